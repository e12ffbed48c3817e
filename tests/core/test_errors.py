"""Each error has its attributes, and can free what it refers to."""

import gc
import re
import weakref

from app.core import errors
from app.core.errors import GatewayError, Outcome


def concrete(error: type[GatewayError] = GatewayError) -> list[type[GatewayError]]:
    """By name: the order of the subclasses depends on the order in which tests import them."""
    below = [each for child in error.__subclasses__() for each in concrete(child)]
    return sorted([*([error] if error.code else []), *below], key=lambda each: each.__name__)


def test_every_error_has_a_code_of_its_own_a_title_and_an_outcome() -> None:
    """Rejections that are temporary also have a time for the next attempt."""
    assert len({error.code for error in concrete()}) == len(concrete())
    for error in concrete():
        assert re.fullmatch(r"[a-z_]+", error.code)
        assert error.title
        assert error.outcome in Outcome
        if error.outcome in {Outcome.REJECTED, Outcome.UNAVAILABLE}:
            assert error.retryable
            assert error.retry_after_s is not None


def test_forget_frames_frees_the_frames_of_the_error_and_of_its_causes() -> None:
    class Call:
        """Keeps its error, as a call to Triton does."""

        def __init__(self) -> None:
            self.error = ValueError("from Triton")

        def response(self, _body: bytes) -> None:
            raise self.error

    def failed(call: Call) -> errors.ModelError:
        try:
            try:
                call.response(b"large")
            except ValueError as exc:
                raise errors.ModelError("failed") from exc
        except errors.ModelError as exc:
            return exc

    call = Call()
    freed = weakref.ref(call)
    gc.disable()
    try:
        error = failed(call)
        del call
        assert freed() is not None
        error.forget_frames()
        assert freed() is None
    finally:
        gc.enable()
