"""``GATEWAY_LOG_TENSORS=shapes``: logs name, datatype and shape of each output with the request id, but no values."""

import logging

from app.domain.calls import ObservedCall
from app.domain.inference import InferenceRequest, InferenceResponse
from app.observability.log import StructuredLogger

_log = StructuredLogger("triton_gateway.tensors")


class TensorLog:
    """Observes calls; logs one line for each response."""

    def started(self, request: InferenceRequest, method: str) -> ObservedCall:
        return _LoggedCall(request)


class _LoggedCall(ObservedCall):
    def __init__(self, request: InferenceRequest) -> None:
        super().__init__(request)
        self._number = 0

    def response(self, response: InferenceResponse) -> None:
        self._number += 1
        fields = {
            "triton_request_id": self.request.request_id,
            "model": self.request.model,
            "response": self._number,
            "tensors": " ".join(f"{each.name}:{each.datatype}{list(each.shape)}" for each in response.outputs.values()),
            "final": response.is_final,
        }
        _log.log(logging.INFO, "tensors", fields)
