"""The sessions of this process: opens them, finds them by their id, and frees their places in Triton."""

import asyncio
import secrets
from time import monotonic

from msgspec.structs import replace

from app.admission.admission import PipelineAdmission
from app.core.aio import BackgroundTasks
from app.core.engine import InferenceServer, discard_stream
from app.core.errors import GatewayError, UnknownSession
from app.core.inference import Deadline, new_request_id
from app.core.sequence import MAX_ID_BYTES, SequenceIds
from app.core.share import Share
from app.pipelines.pipeline import Pipeline
from app.pipelines.sessions import SessionTerms
from app.sessions.places import Places, SessionOwner
from app.sessions.session import AnswerMemory, End, PipelineSession

ID_BYTES = 16
"""A session id is a bearer capability: whoever has it can run steps."""
KEEP_S = 60.0
"""How long an ended session is known: to repeat its last answer, and to tell that it was lost."""
MOST_PAST = 10_000
SLACK_S = 1.0
"""How much later than its idle time Triton may forget a sequence."""


def new_sequence_id(ids: SequenceIds, share: Share) -> int | str:
    """Returns a random id. The processes of a gateway never make the same one.

    Other gateways at the same Triton make the same one with a chance of 1 in 2**62, or 1 in 2**30 for models whose
    control has 32 bits. Triton 2.51 reads a text as if it had 128 bytes, whatever its length.
    """
    own = ids.own
    if isinstance(own, str):
        return (own + secrets.token_hex(MAX_ID_BYTES // 2))[:MAX_ID_BYTES]
    return own[secrets.randbelow(len(own) // share.of) * share.of + share.number - 1]


class Sessions:
    """A subclass notes what happens to the sessions."""

    def __init__(self, engine: InferenceServer, share: Share) -> None:
        self._engine = engine
        self._places = Places(share)
        self._share = share
        self._memory = AnswerMemory()
        self._open: dict[str, PipelineSession] = {}
        self._past: dict[str, PipelineSession] = {}
        """Those that ended a short time ago, in this order."""
        self._used_ids = set[int | str]()
        self._leaving = BackgroundTasks()

    def open(self, pipeline: Pipeline, admission: PipelineAdmission, owner: SessionOwner) -> PipelineSession:
        """``pipeline``: one with sessions. Raises TooManyRequests or ModelNotReady."""
        terms, homes = pipeline.session, self._engine.homes(pipeline.spec.model, pipeline.spec.version)
        assert terms is not None
        place = self._places.take(pipeline.name, terms, homes, len(self._engine.states()) or 1, owner)
        session = PipelineSession(
            secrets.token_urlsafe(ID_BYTES),
            owner.key,
            pipeline.of_session(),
            admission,
            self._new_sequence_id(terms),
            place,
            self._ended,
            self._memory,
        )
        self._open[session.id] = session
        self._note_open(session)
        return session

    def find(self, session_id: str) -> PipelineSession:
        """Returns also a session that ended a short time ago. Raises UnknownSession."""
        session = self._open.get(session_id) or self._past.get(session_id)
        if session is None:
            raise UnknownSession("This process has no such session, or it has ended.")
        return session

    def _note_open(self, session: PipelineSession) -> None: ...

    def _note_end(self, session: PipelineSession, reason: End) -> None:
        """The session takes no further steps. Its last step may still run."""

    def _note_left(self, session: PipelineSession) -> None:
        """The gateway does nothing more for the session."""

    def _new_sequence_id(self, terms: SessionTerms) -> int | str:
        while (sequence_id := new_sequence_id(terms.ids, self._share)) in self._used_ids:
            pass
        self._used_ids.add(sequence_id)
        return sequence_id

    def _ended(self, session: PipelineSession, reason: End) -> None:
        self._past[session.id] = self._open.pop(session.id)
        self._note_end(session, reason)
        self._leaving.start(self._leave(session))
        asyncio.get_running_loop().call_later(KEEP_S, self._forget, session.id)
        if len(self._past) > MOST_PAST:
            self._forget(next(iter(self._past)))

    async def _leave(self, session: PipelineSession) -> None:
        """Ends the sequence in Triton if that is possible, and frees its place when Triton has forgotten it."""
        await session.settle()
        until = await self._forgotten_at(session)
        self._note_left(session)
        if until is None:
            self._free(session)
        else:
            self._places.hold(session.place, until)
            asyncio.get_running_loop().call_later(until - monotonic(), self._free, session)

    async def _forgotten_at(self, session: PipelineSession) -> float | None:
        """When Triton forgets the sequence, in monotonic seconds; None if it has no such sequence any more."""
        if session.queued_at is None or session.has_end_flag or session.sequence.is_forgotten:
            return None
        ending = None if session.sequence.is_lost else session.pipeline.ending_request()
        if ending is not None:
            request = replace(session.in_sequence(ending, ends=True), request_id=new_request_id())
            deadline = Deadline.after(session.terms.triton_idle_s)
            try:
                await discard_stream(self._engine, request, deadline)
            except GatewayError:
                pass
            else:
                return None
            if session.sequence.is_forgotten:
                return None
        return session.queued_at + session.terms.longest_idle_s + SLACK_S

    def _free(self, session: PipelineSession) -> None:
        self._places.release(session.place)
        self._used_ids.discard(session.sequence_id)

    def _forget(self, session_id: str) -> None:
        """``session_id``: the session itself would stay in memory until its timer fires, beyond MOST_PAST."""
        session = self._past.pop(session_id, None)
        if session is not None:
            session.forget()
