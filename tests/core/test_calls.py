"""Several observers of a call act as one observer."""

from msgspec.structs import replace

from app.core.engine import CallObservers, ObservedCall
from app.core.errors import GatewayError
from app.core.inference import InferenceRequest, InferenceResponse

REQUEST = InferenceRequest("m", ())


class Renaming:
    """Sends the request to another model, and records its notifications."""

    def __init__(self, model: str, notices: list[str]) -> None:
        self.model = model
        self.notices = notices

    def __call__(self, request: InferenceRequest, method: str) -> ObservedCall:
        self.notices.append(f"{self.model} started {request.model}")
        return _Renamed(replace(request, model=self.model), self.notices)


class _Renamed(ObservedCall):
    def __init__(self, request: InferenceRequest, notices: list[str]) -> None:
        super().__init__(request)
        self.notices = notices

    def response(self, response: InferenceResponse) -> None:
        self.notices.append(f"{self.request.model} response")

    def ended(self, code: str, error: GatewayError | None) -> None:
        self.notices.append(f"{self.request.model} {code}")


def test_each_observer_gets_the_previous_observers_request() -> None:
    notices: list[str] = []
    call = CallObservers(Renaming("a", notices), Renaming("b", notices))(REQUEST, "ModelInfer")
    call.response(InferenceResponse({}))
    call.ended("OK", None)
    assert call.request.model == "b"
    assert notices == ["a started m", "b started a", "a response", "b response", "a OK", "b OK"]


def test_without_an_observer_the_request_stays_the_same() -> None:
    call = CallObservers()(REQUEST, "ModelInfer")
    call.response(InferenceResponse({}))
    call.ended("OK", None)
    assert call.request is REQUEST
