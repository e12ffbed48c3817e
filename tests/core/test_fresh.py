"""Answers that are asked for again only after a while."""

import asyncio

import pytest

from app.core.aio import Fresh


class Asked:
    def __init__(self) -> None:
        self.count = 0
        self.fails = False

    async def __call__(self) -> int:
        self.count += 1
        await asyncio.sleep(0)
        if self.fails:
            raise ValueError
        return self.count


async def test_callers_at_the_same_time_get_one_answer() -> None:
    asked = Asked()
    fresh = Fresh(asked, 60)
    assert await asyncio.gather(*(fresh.current() for _ in range(3))) == [1, 1, 1]


async def test_an_old_answer_is_replaced() -> None:
    asked = Asked()
    fresh = Fresh(asked, 0)
    assert [await fresh.current(), await fresh.current()] == [1, 2]


async def test_a_failure_is_not_kept() -> None:
    asked = Asked()
    fresh = Fresh(asked, 60)
    asked.fails = True
    with pytest.raises(ValueError):  # noqa: PT011 - raised here
        await fresh.current()
    asked.fails = False
    assert await fresh.current() == 2
