"""Detects dead model processes from the error texts of Triton."""

import time

import pytest

from app.core.model import ModelConfig, Step
from app.triton.health.python_backend import REPEATED, Stubs

DEAD = "Stub process '{}' is not healthy."


def config(name: str, *steps: str, instances: int = 1) -> ModelConfig:
    return ModelConfig(
        name, "python", 0, (), (), steps=tuple(Step(step, "", (), ()) for step in steps), instance_count=instances
    )


@pytest.fixture
def deaths() -> list[str]:
    return []


@pytest.fixture
def stubs(deaths: list[str]) -> Stubs:
    """The ensemble ``whole`` runs ``part`` and ``inner``; ``inner`` runs ``part_two``; ``other`` is separate."""
    known = Stubs(deaths.append)
    for each in (
        config("whole", "part", "inner"),
        config("inner", "part_two"),
        config("part"),
        config("part_two", instances=3),
        config("other"),
    ):
        known.learn(each)
    return known


def fail(stubs: Stubs, called: str, message: str, times: int = 1, began: float | None = None) -> None:
    for _ in range(times):
        stubs.suspect(called, message, time.monotonic() if began is None else began)


def test_errors_of_calls_before_a_repair_are_ignored(stubs: Stubs) -> None:
    """Triton answers a call to the old process up to 5 s later, when the model already has a new one."""
    began = time.monotonic()
    stubs.condemn("part")
    stubs.revive("part")
    fail(stubs, "whole", DEAD.format("part_0_0"), REPEATED, began)
    assert stubs.suspects == []
    fail(stubs, "whole", DEAD.format("part_0_0"), REPEATED)
    assert stubs.repeated("whole") == "part"


@pytest.mark.parametrize(
    ("stub", "owner"),
    [("part_0_0", "part"), ("part_two_1_0", "part_two"), ("part_0_gpu1", "part"), ("other_0_0", None), ("parts", None)],
)
def test_the_owner_is_a_model_that_the_called_model_runs(stubs: Stubs, stub: str, owner: str | None) -> None:
    assert stubs.owner("whole", f"in ensemble 'whole', {DEAD.format(stub)}") == owner


def test_the_text_is_found_within_a_message_of_a_bls_model(stubs: Stubs) -> None:
    assert stubs.owner("whole", f"the child failed: {DEAD.format('part_0_0')} Sorry.") == "part"


@pytest.mark.parametrize("message", ["no boxes", DEAD.format("other_0_0")])
def test_other_errors_cause_no_suspicion(stubs: Stubs, message: str) -> None:
    """The process of a model that the called model does not run is ignored too."""
    fail(stubs, "whole", message)
    assert stubs.suspects == []


def test_errors_alone_are_not_a_death(stubs: Stubs, deaths: list[str]) -> None:
    """The suspicion must be confirmed, because the error may contain text of a caller."""
    fail(stubs, "whole", DEAD.format("part_0_0"), times=50)
    assert (stubs.suspects, stubs.dead, deaths) == (["whole"], [], [])
    assert stubs.is_alive("whole")


def test_repeated_errors_name_one_model(stubs: Stubs) -> None:
    fail(stubs, "whole", DEAD.format("part_0_0"), times=REPEATED - 1)
    fail(stubs, "whole", DEAD.format("part_two_0_0"))
    assert stubs.repeated("whole") is None
    fail(stubs, "whole", DEAD.format("part_0_0"))
    assert stubs.repeated("whole") == "part"


def test_a_text_without_a_name_refers_to_the_called_model(stubs: Stubs) -> None:
    fail(stubs, "part", "Stub process is not healthy.", times=REPEATED)
    assert stubs.repeated("part") == "part"


def test_a_dead_step_fails_every_model_that_uses_it(stubs: Stubs, deaths: list[str]) -> None:
    stubs.condemn("part_two")
    stubs.condemn("part_two")
    assert deaths == ["part_two"]
    alive = {name: stubs.is_alive(name) for name in ("whole", "inner", "part_two", "part", "other")}
    assert alive == {"whole": False, "inner": False, "part_two": False, "part": True, "other": True}
    stubs.revive("part_two")
    assert stubs.is_alive("whole")


def test_a_revived_model_is_not_suspected(stubs: Stubs) -> None:
    stubs.condemn("part")
    fail(stubs, "whole", DEAD.format("part_0_0"), times=REPEATED)
    stubs.revive("part")
    assert stubs.suspects == []


def test_instances_is_the_maximum_over_all_steps(stubs: Stubs) -> None:
    assert (stubs.instances("whole"), stubs.instances("other"), stubs.instances("unknown")) == (3, 1, 1)


def test_a_cycle_of_models_ends_the_search() -> None:
    stubs = Stubs()
    stubs.learn(config("a", "b"))
    stubs.learn(config("b", "a"))
    assert stubs.run_by("a") == {"a", "b"}
