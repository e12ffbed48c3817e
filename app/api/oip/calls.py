"""Calls of models by their own names: what they run, and the errors of models."""

from operator import is_

from msgspec.structs import replace

from app.api.access import check_model
from app.api.exchange import Exchange
from app.api.inference import Inference, InferenceCall, Target
from app.api.oip.errors import is_of_model
from app.api.oip.signature import Signature
from app.core.answer import Answer, Ending
from app.core.errors import GatewayError, InvalidRequest, ModelNotReady, UnknownModel
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.observability.metrics import NO_PIPELINE
from app.pipelines.error_hints import public_text
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import STREAM_DEFAULTS, StreamSpec

ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, and so does infer; "
    "call generate_stream for a model that sends any number of responses."
)
"""Begins as Triton's text."""


class OneResponse(Answer):
    """The answer of a unary request."""

    has_enough = False
    """Whether there is a second response, which is an error."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled
        self.responses: list[InferenceResponse] = []

    def add(self, response: InferenceResponse) -> None:
        """Ignores a response of a decoupled model without outputs."""
        if response.outputs or not self._decoupled:
            self.has_enough = bool(self.responses)
            self.responses.append(response)

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises ``error``, or InvalidRequest if there is not exactly one response."""
        if error is not None:
            raise error
        if self.has_enough or not self.responses:
            raise InvalidRequest(ONE_RESPONSE)
        return Ending()


class ModelCalls:
    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self._signatures: dict[str, Signature] = {}
        self._targets: dict[str, tuple[tuple[object, ...], Target]] = {}

    @property
    def timeout_s(self) -> float:
        return self.inference.catalog.context.timeout_s

    def admit(self, exchange: Exchange, model: str, transport: str) -> Signature:
        """The request counts as work until its last byte is sent, under no pipeline's name.

        Raises Forbidden, Draining, UnknownModel or ModelNotReady.
        """
        exchange.record.transport = transport
        check_model(exchange, self.inference.catalog, model)
        signature = self._signature_of(model)
        self.inference.workload.begin(exchange.work)
        return signature

    def _signature_of(self, model: str) -> Signature:
        """Compiled when the configuration is first used."""
        models = self.inference.catalog.oip_models
        config, rules, known = models.config(model), models.rules(model), self._signatures.get(model)
        if known is None or known.config is not config or known.rules is not rules:
            known = self._signatures[model] = Signature.compile(config, rules)
        return known

    def target_of(self, signature: Signature) -> Target:
        """Returns the same object until the model's configuration or limit changes."""
        models, model = self.inference.catalog.oip_models, signature.config.name
        parts, known = (signature, models.capacity(model), models.in_flight), self._targets.get(model)
        if known is None or not all(map(is_, known[0], parts)):
            known = self._targets[model] = parts, self._new_target(signature)
        return known[1]

    def _new_target(self, signature: Signature) -> Target:
        model = signature.config.name
        return Target(
            admission=self.inference.admission_of(
                NO_PIPELINE, model, self.inference.catalog.oip_models.capacity(model)
            ),
            decoupled=signature.config.decoupled,
            stream=self._stream_of(model),
            prepared=self._prepared,
            abandon=self._abandon,
            commits=False,
        )

    def _stream_of(self, model: str) -> StreamSpec:
        """The defaults, with the longest ``first_output_s`` that a pipeline over the model declares."""
        first_output_s = self.inference.catalog.oip_models.first_output_s.get(model)
        return STREAM_DEFAULTS.model_copy(update={"first_output_s": first_output_s})

    async def answer(
        self, exchange: Exchange, target: Target, request: InferenceRequest, deadline: Deadline
    ) -> InferenceResponse:
        """The one response. Raises GatewayError, which the caller may see."""
        answer = OneResponse(decoupled=target.decoupled)
        call = InferenceCall(target, request, answer, deadline, exchange.record, exchange.caller)
        try:
            await self.inference.answer(call)
        except GatewayError as exc:
            self.explain(exc, request)
            exc.detail = "".join(f"{each.field}: " for each in exc.errors) + exc.detail
            raise
        return answer.responses[0]

    def explain(self, error: GatewayError, request: InferenceRequest) -> None:
        """Completes the error of a call. Raises UnknownModel instead if Triton does not have the version."""
        if isinstance(error, ModelNotReady) and _has_no_version(error, request):
            raise UnknownModel.named(request.model, request.version) from error
        self.complete(error, request.model)

    def complete(self, error: GatewayError, model: str) -> None:
        """Names the model in an error of it, or shows its own message if the operator allows that. Idempotent."""
        named = f"Model '{model}' failed: "
        if error.upstream is None or not is_of_model(error):
            return
        if self.inference.catalog.context.exposes_oip_errors:
            error.detail, error.hint = public_text(error.upstream.message), None
        elif error.fault is not None and not error.detail.startswith(named):
            error.detail = named + error.detail[0].lower() + error.detail[1:]

    def _prepared(self, request: InferenceRequest, _deadline: Deadline) -> InferenceRequest:
        catalog = self.inference.catalog
        if request.model in catalog.oip_models.idempotent:
            request = replace(request, idempotent=True)
        coalescing = catalog.coalescing_of(request.model) if request.idempotent else None
        return request if coalescing is None else request.coalesced(coalescing)

    def stoppable(self, request: InferenceRequest) -> InferenceRequest:
        """The request of a stream, which ends without a cancellation if a ``cancel`` model can stop it."""
        return replace(request, ends_by_hook=self._hook_of(request.model) is not None)

    def _abandon(self, request: InferenceRequest) -> None:
        pipeline = self._hook_of(request.model)
        if pipeline is not None:
            self.inference.canceller.cancel(pipeline, request)

    def _hook_of(self, model: str) -> Pipeline | None:
        """A pipeline over the model that declares ``cancel``: Triton would not stop a step of the model."""
        entries = self.inference.catalog.entries.values()
        pipelines = (entry.pipeline for entry in entries if entry.pipeline is not None)
        return next((each for each in pipelines if each.spec.model == model and each.spec.cancel is not None), None)


def _has_no_version(error: ModelNotReady, request: InferenceRequest) -> bool:
    """Whether Triton does not have the version. A model that is being loaded is not such a case."""
    if not request.version or error.upstream is None or error.was_answered:
        return False
    return error.upstream.grpc_code in {"NOT_FOUND", None}
