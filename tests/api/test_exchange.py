"""One request: its address, its headers, and the memory that it holds."""

from app.api.body_memory import ByteBudget
from tests.toolkit.exchange import exchange_with
from tests.toolkit.gateway import Served

IMAGE = {"image": "iVBORw0KGgo="}


async def test_samples_use_the_scheme_of_a_trusted_proxy(api: Served) -> None:
    answer = await api.client.get("/v1/pipelines/read", headers={"X-Forwarded-Proto": "https"})
    assert "https://gateway/v1/pipelines/read" in answer.json()["samples"]["curl"]


async def test_the_first_of_two_headers_with_one_name_is_used() -> None:
    exchange = exchange_with([("x-request-timeout", "1"), ("x-request-timeout", "2")])
    assert exchange.header(b"x-request-timeout") == "1"


async def test_held_bytes_are_released_when_the_exchange_ends() -> None:
    budget = ByteBudget(100)
    exchange = exchange_with(budget=budget)
    exchange.hold(60)
    assert budget.taken == 60
    exchange.close()
    assert budget.taken == 0
