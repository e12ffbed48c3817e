import pytest

from app.core.errors import InvalidRequest
from tests.toolkit.exchange import exchange_with


def remaining(asked: str | None, timeout_s: float = 30) -> float:
    headers = [] if asked is None else [("x-request-timeout", asked)]
    return exchange_with(headers).deadline(timeout_s).remaining_s()


async def test_the_default_is_the_pipelines_deadline() -> None:
    assert remaining(None) == pytest.approx(30, abs=1)


async def test_a_caller_can_shorten_the_deadline_but_not_extend_it() -> None:
    assert remaining("2.5") == pytest.approx(2.5, abs=1)
    assert remaining("1e9") == pytest.approx(30, abs=1)


async def test_a_very_short_deadline_becomes_the_minimum() -> None:
    assert 0 < remaining("1e-300") <= 0.05


@pytest.mark.parametrize("asked", ["", "0", "-1", "nan", "inf", "-inf", "1e999", "soon", "1s", "1,5", "0x1"])
async def test_only_positive_numbers_are_accepted(asked: str) -> None:
    with pytest.raises(InvalidRequest):
        remaining(asked)
