"""The tree at the top of the module is the tree of the classes."""

import re

from app.domain import errors
from app.domain.errors import GatewayError, Outcome


def concrete(error: type[GatewayError] = GatewayError) -> list[type[GatewayError]]:
    below = [each for child in error.__subclasses__() for each in concrete(child)]
    return [*([error] if hasattr(error, "code") else []), *below]


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    drawn = set(re.findall(r"[A-Z][A-Za-z]+", (errors.__doc__ or "").split("GatewayError", 1)[1]))
    assert {each.__name__ for each in concrete()} <= drawn


def test_every_error_says_its_code_its_title_and_its_outcome() -> None:
    for error in concrete():
        assert re.fullmatch(r"[a-z_]+", error.code)
        assert error.title
        assert error.outcome in Outcome


def test_codes_are_not_shared() -> None:
    codes = [error.code for error in concrete()]
    assert len(codes) == len(set(codes))


def test_retryable_rejections_have_retry_after() -> None:
    for error in concrete():
        if error.outcome in {Outcome.REJECTED, Outcome.UNAVAILABLE}:
            assert error.retryable
            assert error.retry_after_s is not None
