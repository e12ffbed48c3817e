"""The id of a session names the process that has it."""

import pytest

from app.core.errors import MisdirectedSession, SessionLost, UnknownSession
from app.sessions.home import SessionHome

HOMES = [SessionHome.at("pod-a", 8080, number, 3) for number in (1, 2, 3)]


def test_every_worker_finds_the_owner_of_a_session() -> None:
    for owner in HOMES:
        session_id = owner.new_id()
        assert [home.owner_of(session_id) for home in HOMES] == [owner.number] * 3
    assert HOMES[1].others == [1, 3]
    assert len({home.socket_of(number) for home in HOMES for number in (1, 2, 3)}) == 3


@pytest.mark.parametrize("other", [SessionHome.at("pod-b", 8080, 1, 3), SessionHome.at("pod-a", 8081, 1, 3)])
def test_another_gateway_is_not_the_owner(other: SessionHome) -> None:
    with pytest.raises(MisdirectedSession):
        HOMES[0].owner_of(other.new_id())


def test_a_session_is_lost_with_the_process_that_had_it() -> None:
    replaced, replacement = HOMES[0], SessionHome.at("pod-a", 8080, 1, 3)
    with pytest.raises(SessionLost):
        replacement.owner_of(replaced.new_id())
    assert HOMES[1].owner_of(replaced.new_id()) == 1


def test_a_gateway_with_a_name_has_it_in_its_ids() -> None:
    home, other = SessionHome("gateway-a"), SessionHome("gateway-b")
    assert home.new_id().startswith("gateway-a.1.")
    assert home.owner_of(home.new_id()) == 1
    with pytest.raises(MisdirectedSession):
        home.owner_of(other.new_id())


@pytest.mark.parametrize("number", ["0", "4", "9" * 5000])
def test_a_session_of_a_worker_that_does_not_exist_is_lost(number: str) -> None:
    with pytest.raises(SessionLost):
        HOMES[0].owner_of(f"{HOMES[0].gateway}.{number}.{HOMES[0].process}.x")


TEXTS = ["", "abc", "abc.1.x", "{}", "{}.", "{}.1.x.y", "{}.x.00000000.y", "{}.\u0661.00000000.x", "{}.-1.00000000.x"]
TEXTS += ["A.1.00000000.x", f"{'a' * 33}.1.00000000.x"]


@pytest.mark.parametrize("session_id", TEXTS)
def test_other_texts_are_no_ids(session_id: str) -> None:
    with pytest.raises(UnknownSession):
        HOMES[0].owner_of(session_id.format(HOMES[0].gateway))
