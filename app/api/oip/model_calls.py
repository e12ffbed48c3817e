"""Calls of models by their own names: what they run, and the errors of models."""

from operator import is_

from app.api.access import check_model
from app.api.call import Inference, InferenceCall
from app.api.exchange import Exchange
from app.api.oip.oip_errors import is_of_model
from app.api.oip.signature import Signature
from app.core.answer import Answer, Ending
from app.core.errors import GatewayError, InvalidRequest, ModelNotReady, UnknownModel
from app.core.inference import InferenceRequest, InferenceResponse
from app.pipelines.error_hints import public_text

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
        ending = super().finish(error)
        if self.has_enough or not self.responses:
            raise InvalidRequest(ONE_RESPONSE)
        return ending


class ModelCalls:
    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self._signatures: dict[str, tuple[tuple[object, ...], Signature]] = {}

    def begin(self, exchange: Exchange, model: str, transport: str) -> tuple[Signature, InferenceCall]:
        """The request counts as work until its last byte is sent, under no pipeline's name.

        Raises Forbidden, Draining, UnknownModel, ModelNotReady, and the errors of :meth:`Inference.begin`.
        """
        exchange.record.transport = transport
        check_model(exchange, self.inference.catalog, model)
        signature = self._signature_of(model)
        self.inference.workload.begin(exchange)
        unary_s = self.inference.catalog.context.timeout_s
        timeout_s = signature.stream_terms.timeout_s if transport == "stream" else unary_s
        return signature, self.inference.begin(exchange, signature, timeout_s)

    def _signature_of(self, model: str) -> Signature:
        """Returns the same object until the model's configuration, or a pipeline over it, changes."""
        catalog = self.inference.catalog
        models = catalog.oip_models
        config, rules = models.config(model), models.rules(model)
        layers = catalog.layers_of(model) if rules.idempotent else ()
        parts = config, rules, models.capacity(model), models.in_flight, layers
        known = self._signatures.get(model)
        if known is None or not all(map(is_, known[0], parts)):
            known = self._signatures[model] = parts, Signature.compile(model, models, layers)
        return known[1]

    async def answer(self, call: InferenceCall, request: InferenceRequest) -> InferenceResponse:
        """The one response. Raises GatewayError, which the caller may see."""
        call.requests, call.answer = [request], (answer := OneResponse(decoupled=call.target.config.decoupled))
        try:
            await self.inference.answer(call)
        except GatewayError as exc:
            self.explain(exc, request)
            exc.detail = "".join(f"{each.field}: " for each in exc.errors) + exc.detail
            raise
        return answer.responses[0]

    def explain(self, error: GatewayError, request: InferenceRequest) -> None:
        """Completes the error of a call. Raises UnknownModel instead if Triton does not have the version."""
        if isinstance(error, ModelNotReady) and request.version and error.upstream is not None:
            is_loading = error.was_answered or error.upstream.grpc_code not in {"NOT_FOUND", None}
            if not is_loading:
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
