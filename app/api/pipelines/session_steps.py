"""Opens the sessions of pipelines, and runs their steps: each is a request of one sequence in Triton."""

import logging
from dataclasses import dataclass
from time import monotonic

from app.admission.admission import PipelineAdmission
from app.admission.keys import Caller
from app.api.deadlines import deadline_of
from app.api.exchange import Exchange
from app.api.inference import Inference, InferenceCall
from app.api.pipelines.results import body_of_values, rendered
from app.api.pipelines.session_streams import StepCollector, StepStream
from app.api.workload import Workload
from app.core.errors import InvalidRequest
from app.core.inference import Deadline, InferenceRequest
from app.core.share import Share
from app.core.trace import TraceContext
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import WholeAnswer
from app.sessions.places import SessionOwner
from app.sessions.registry import Sessions
from app.sessions.session import End, PipelineSession, StepAnswer

_log = logging.getLogger("triton_gateway.session")


@dataclass(frozen=True, slots=True)
class Served:
    """What the steps of a session run: its pipeline as it was when the session was opened."""

    pipeline: Pipeline
    admission: PipelineAdmission


ServedSession = PipelineSession[Served]


class StepCall(InferenceCall, eq=False, kw_only=True):
    session: ServedSession

    def prepared(self, request: InferenceRequest, trace: TraceContext | None) -> InferenceRequest:
        """Makes the request the running step of the session's sequence."""
        return self.session.prepared(super().prepared(request, trace))


class SessionRecords:
    """Tells workload, metrics and log what happens to sessions. Implements SessionObserver."""

    def __init__(self, metrics: Metrics, workload: Workload) -> None:
        self._metrics = metrics
        self._workload = workload

    def opened(self, session: ServedSession) -> None:
        self._workload.add(session)
        self._metrics.sessions.opened(session.pipeline)

    def ended(self, session: ServedSession, reason: End) -> None:
        self._metrics.sessions.ended(session.pipeline, reason)
        fields = {
            "pipeline": session.pipeline,
            "reason": str(reason),
            "steps": session.steps,
            "duration_s": round(monotonic() - session.opened_at, 3),
            "key": session.owner,
        }
        _log.log(logging.WARNING if reason is End.LOST else logging.INFO, "session ended", extra=fields)

    def left(self, session: ServedSession) -> None:
        self._workload.remove(session)


class SessionSteps:
    """``sessions``: those of this process, over HTTP and WebSockets."""

    def __init__(self, inference: Inference, share: Share) -> None:
        self._inference = inference
        self.sessions = Sessions(
            inference.catalog.engine,
            share,
            SessionRecords(inference.metrics, inference.workload),
            lambda session: session.subject.pipeline.ending_request(),
        )

    def opened(self, exchange: Exchange, pipeline: Pipeline) -> ServedSession:
        """Opens a session in this process.

        Raises InvalidRequest, TooManyRequests or ModelNotReady.
        """
        name, terms = pipeline.name, pipeline.session
        if terms is None:
            raise InvalidRequest(
                f"This pipeline has no sessions: POST /v1/pipelines/{name} runs a request.",
                hint="An operator can declare `session: true` for a model with `sequence_batching` in gateway.yaml.",
            )
        served = Served(pipeline.of_session(), self._inference.admission_of(pipeline))
        model = pipeline.spec.model, pipeline.spec.version
        owner = SessionOwner(exchange.caller.id, exchange.caller.limits.sessions)
        return self.sessions.open(name, model, terms, owner, served)

    async def answer(
        self, record: RequestRecord, caller: Caller, session: ServedSession, inference: InferenceRequest
    ) -> StepAnswer:
        """Runs longer than the caller waits, but not longer than Triton knows the sequence."""
        pipeline = session.subject.pipeline
        deadline = Deadline.after(session.terms.triton_idle_s)
        call = StepCall(pipeline, session.subject.admission.claim_of(caller), deadline, record, session=session)
        call.requests, call.answer = [inference], WholeAnswer(pipeline, inference)
        ending = await self._inference.answer(call)
        values, _ = rendered(pipeline, ending)
        return StepAnswer(await body_of_values(values), ending.early_exit)

    def stream_deadline(self, exchange: Exchange, session: ServedSession) -> Deadline:
        """Of a step whose answer is a stream. Raises InvalidRequest if the pipeline does not stream."""
        spec = session.subject.pipeline.stream_spec()
        return deadline_of(exchange, min(spec.timeout_s, session.terms.reach_s))

    def stream_of(
        self,
        record: RequestRecord,
        caller: Caller,
        session: ServedSession,
        inference: InferenceRequest,
        deadline: Deadline,
    ) -> StepStream:
        """A step whose answer is a stream."""
        served = session.subject
        call = StepCall(served.pipeline, served.admission.claim_of(caller), deadline, record, session=session)
        call.requests, call.answer = [inference], StepCollector(served.pipeline, inference, session)
        return StepStream(self._inference, session, call)
