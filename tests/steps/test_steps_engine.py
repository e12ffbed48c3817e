"""What the steps of one request do: their order, conditions, exits, items, failures and streams."""

import asyncio
import gc
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import yaml

from app.core.errors import ContractViolation, DeadlineExceeded, GatewayError, ModelError
from app.core.inference import (
    Array,
    Deadline,
    InferenceRequest,
    InferenceResponse,
    KeptMemory,
    Tensor,
)
from app.core.model import TensorSpec
from app.steps.plan import Source
from app.steps.planner import Planner
from app.steps.steps_engine import StepsEngine
from app.steps.steps_spec import StepSpec
from tests.toolkit.numpy_models import Arrays, FreeSlots, NumpyEngine, numpy_model
from tests.toolkit.waiting import until

SLOW_S = 60.0


def fails(x: Array) -> Arrays:
    raise ModelError(f"The model failed for {x.size} elements.")


def counted(x: Array) -> Iterator[Arrays]:
    return ({"Y": np.asarray([number])} for number in range(int(x[0])))


MODELS = {
    each.config.name: each
    for each in [
        numpy_model("double", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: {"Y": x * 2}),
        numpy_model("slow", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: {"Y": x}),
        numpy_model("add", ["a FP32 [-1]", "b FP32 [-1]"], ["Y FP32 [-1]"], lambda a, b: {"Y": a + b}),
        numpy_model("row", ["x FP32 [2]"], ["Y FP32 [1]"], lambda x: {"Y": x.sum(keepdims=True)}, max_batch_size=3),
        numpy_model("scaled", ["x FP32 [2]", "by FP32 [1]"], ["Y FP32 [2]"], lambda x, by: {"Y": x * by}),
        numpy_model(
            "hinted", ["x FP32 [-1]", "hint FP32 [1] optional"], ["Y FP32 [-1]"], lambda x, hint=0: {"Y": x + hint}
        ),
        numpy_model("fails", ["x FP32 [-1]"], ["Y FP32 [-1]"], fails),
        numpy_model("square", ["x FP32 [-1]"], ["Y FP32 [2]"], lambda x: {"Y": x}),
        numpy_model("nothing", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: {}, parameters=(("may_omit", "Y"),)),
        numpy_model("stream", ["x FP32 [-1]"], ["Y FP32 [1]"], counted, decoupled=True),
        numpy_model("other", ["x FP32 [-1]"], ["Y FP32 [1]"], counted, decoupled=True),
    ]
}


class Steps:
    """The steps of one request, over models that are functions. ``slow`` takes longer than any test."""

    def __init__(self, text: str, outputs: Iterable[str | tuple[str, ...]] = (), *, is_race: bool = False) -> None:
        specs = {name: StepSpec.model_validate(each) for name, each in yaml.safe_load(text).items()}
        sources = [Source((each,) if isinstance(each, str) else each, is_race) for each in outputs]
        configs = {name: each.config for name, each in MODELS.items()}
        fields = {"mode": TensorSpec("mode", "BYTES", (1,), optional=True)}
        self.plan = Planner(specs, configs, fields).planned("steps", dict.fromkeys(sources, ()))
        self.models = NumpyEngine(MODELS, pause=lambda model: SLOW_S if model == "slow" else 0.0)
        self.slots = FreeSlots()
        self.outcomes: list[tuple[str, str]] = []
        self.engine = StepsEngine(self.models, self.slots.enter, lambda _, *outcome: self.outcomes.append(outcome))

    def request(self, parameters: dict[str, Any] | None = None, **given: Any) -> InferenceRequest:
        tensors = tuple(Tensor(name, "FP32", np.asarray(array, np.float32)) for name, array in given.items())
        return self.plan.extended(InferenceRequest("steps", tensors, parameters=parameters or {}))

    async def answer(self, parameters: dict[str, Any] | None = None, within_s: float = 5, **given: Any) -> Any:
        """The outputs as lists, and the reason of an early exit. Nothing may be left behind."""
        try:
            request = self.request(parameters, **given)
            response = await self.engine.infer(request, Deadline.after(within_s))
        finally:
            assert self.models.running == self.slots.taken == 0
        return values_of(response), response.early_exit

    async def events(self, **given: Any) -> list[Any]:
        request = self.request(**given)
        try:
            async with aclosing(self.engine.infer_stream(request, Deadline.after(5))) as responses:
                return [(values_of(each), each.early_exit) async for each in responses]
        finally:
            assert self.models.running == self.slots.taken == 0

    @property
    def calls(self) -> list[str]:
        return [each.model for each in self.models.requests]


def values_of(response: InferenceResponse) -> dict[str, Any]:
    return {name: each.array.tolist() for name, each in response.outputs.items()}


class KeepingEngine(NumpyEngine):
    """Notes when a call starts, and when the memory of its outputs is given back."""

    events: list[str]

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        number = len(self.requests)
        self.events.append(f"call {number}")
        (kept,) = (each for each in request.extensions if isinstance(each, KeptMemory))
        kept.releases.append(lambda: self.events.append(f"release {number}"))
        return await super().infer(request, deadline)


async def test_memory_of_outputs_is_given_back_when_nothing_reads_them_any_more() -> None:
    steps = Steps(
        "{a: {model: double, inputs: {x: X}}, b: {model: double, inputs: {x: a.Y}},"
        " c: {model: double, inputs: {x: b.Y}}, d: {model: add, inputs: {a: b.Y, b: c.Y}}}",
        ["d.Y", "c.Y"],
    )
    steps.models = steps.engine.engine = keeping = KeepingEngine(MODELS)
    keeping.events = []
    assert await steps.answer(X=[1]) == ({"d.Y": [12], "c.Y": [8]}, None)
    order = ["call 0", "call 1", "release 0", "call 2", "call 3", "release 1", "release 2", "release 3"]
    assert keeping.events == order


async def test_a_step_waits_for_those_that_it_names() -> None:
    steps = Steps("{b: {model: double, inputs: {x: X}, after: [a]}, a: {model: row, inputs: {x: P}}}", ["b.Y"])
    await steps.answer(X=[1], P=[1, 2])
    assert steps.calls == ["row", "double"]
    assert steps.models.most_running == 1


CONDITIONS = [
    ("all: {equals: [a.Y, 6]}", [3, 3], "fast", True),
    ("any: {at_least: [a.Y, 4]}", [np.nan], "fast", False),
    ("not: {any: {below: [a.Y, 4]}}", [np.nan], "fast", False),
    ("all_of: [{not_empty: a.Y}, {not: {equals: [mode, fast]}}]", [0], "fast", False),
    ("equals: [mode, fast]", [0], "fast", True),
    ("in: [mode, [fast, slow]]", [0], "fast", True),
    ("equals: [mode, slow]", [0], "fast", False),
    ("equals: [mode, fast]", [0], None, False),
    ("not: {equals: [mode, fast]}", [0], None, False),
]


@pytest.mark.parametrize(("condition", "given", "mode", "holds"), CONDITIONS)
async def test_a_step_runs_only_if_its_condition_holds(
    condition: str, given: list[float], mode: str | None, holds: bool
) -> None:
    steps = Steps(
        f"{{a: {{model: double, inputs: {{x: X}}}}, b: {{model: double, when: {{{condition}}}, inputs: {{x: X}}}},"
        " c: {model: double, inputs: {x: b.Y}}}",
        ["c.Y"],
    )
    outputs, _ = await steps.answer({} if mode is None else {"mode": mode}, X=given)
    assert outputs == ({"c.Y": [4 * each for each in given]} if holds else {})
    assert ("b", "skipped") in steps.outcomes or holds


async def test_a_race_is_won_by_the_first_in_time_also_if_the_others_are_needed_elsewhere() -> None:
    steps = Steps(
        "{a: {model: slow, inputs: {x: X}}, b: {model: double, inputs: {x: X}}, c: {model: double, inputs: {x: a.Y}},"
        " d: {model: add, inputs: {a: {race: [a.Y, b.Y]}, b: c.Y}}}",
        [("a.Y", "b.Y"), "d.Y"],
        is_race=True,
    )
    steps.models.pause = lambda model: 0.05 if model == "slow" else 0
    assert await steps.answer(X=[3]) == ({"a.Y or b.Y": [6], "d.Y": [12]}, None)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_race_also_cancels_the_steps_that_only_its_losers_need(is_shared: bool) -> None:
    steps = Steps(
        "{s: {model: slow, inputs: {x: X}}, a: {model: double, inputs: {x: s.Y}}, b: {model: double, inputs: {x: X}},"
        " c: {model: add, inputs: {a: s.Y, b: X}}}",
        [("a.Y", "c.Y", "b.Y")] if not is_shared else [("a.Y", "b.Y")],
        is_race=True,
    )
    if is_shared:
        steps.models.pause = lambda model: 0.02 if model == "slow" else 0
    answered, _ = await steps.answer(X=[3])
    assert [*answered.values()] == [[6]]
    assert steps.models.cancelled == ([] if is_shared else ["slow"])


async def test_a_tensor_of_the_request_wins_a_race_before_its_rivals_start() -> None:
    steps = Steps(
        "{none: {model: double, when: {empty: X}, inputs: {x: X}}, a: {model: slow, inputs: {x: X}},"
        " b: {model: double, inputs: {x: {race: [X, a.Y]}}}}",
        ["b.Y"],
    )
    assert await steps.answer(X=[3]) == ({"b.Y": [6]}, None)
    assert steps.calls == ["double"]


async def test_a_race_goes_on_while_one_may_come() -> None:
    text = "{a: {model: fails, inputs: {x: X}, optional: true}, b: {model: double, inputs: {x: X}}}"
    assert (await Steps(text, [("a.Y", "b.Y")], is_race=True).answer(X=[3]))[0]["a.Y or b.Y"] == [6]


async def test_a_step_behind_a_race_waits_while_one_may_come() -> None:
    steps = Steps(
        "{a: {model: row, inputs: {x: P}}, b: {model: double, inputs: {x: X}},"
        " none: {model: double, when: {empty: X}, inputs: {x: X}},"
        " c: {model: add, inputs: {a: {race: [none.Y, b.Y]}, b: a.Y}}}",
        ["c.Y"],
    )
    steps.models.pause = lambda model: 0.02 if model == "double" else 0
    assert await steps.answer(X=[3], P=[1, 1]) == ({"c.Y": [8]}, None)


async def test_an_exit_cancels_what_runs_and_keeps_what_was_written() -> None:
    steps = Steps(
        "{a: {model: double, inputs: {x: X}}, b: {model: slow, inputs: {x: X}},"
        " done: {when: {empty: a.Y}, exit: nothing_to_do}, c: {model: double, inputs: {x: a.Y}, after: [done]}}",
        ["a.Y", "b.Y", "c.Y"],
    )
    assert await steps.answer(X=[]) == ({"a.Y": []}, "nothing_to_do")
    assert steps.models.cancelled == ["slow"]
    assert ("done", "exit") in steps.outcomes


async def test_rows_are_called_in_batches_and_joined_in_their_order() -> None:
    steps = Steps("{a: {model: row, each: P, inputs: {x: P}, in_flight: 2}}", ["a.Y"])
    rows = [[number, 1] for number in range(8)]
    assert await steps.answer(P=rows) == ({"a.Y": [[number + 1] for number in range(8)]}, None)
    assert [each.inputs[0].shape for each in steps.models.requests] == [(3, 2), (3, 2), (2, 2)]
    assert steps.models.most_running == 2


async def test_without_rows_nothing_is_called() -> None:
    steps = Steps("{a: {model: row, each: P, inputs: {x: P}}, b: {model: fails, each: a.Y, inputs: {x: a.Y}}}", ["b.Y"])
    assert await steps.answer(P=np.empty((0, 2))) == ({"b.Y": []}, None)
    assert steps.calls == []


@pytest.mark.parametrize("has_output", [True, False])
async def test_each_of_several_sources_takes_the_rows_of_that_which_was_written(has_output: bool) -> None:
    steps = Steps(
        "{a: {model: scaled, when: {at_least: [F, 0]}, each: P, inputs: {x: P, by: F}},"
        " b: {model: row, each: a.Y, inputs: {x: {first: [a.Y, Q]}}}}",
        ["b.Y"],
    )
    outputs, _ = await steps.answer(F=[10 if has_output else -1], P=[[1, 2], [3, 4]], Q=[[3, 4], [5, 6]])
    assert outputs == {"b.Y": [[30], [70]] if has_output else [[7], [11]]}
    assert steps.calls.count("scaled") == 2 * has_output


async def test_a_step_without_the_rows_of_each_is_skipped_also_if_its_model_does_not_need_them() -> None:
    steps = Steps(
        "{a: {model: row, when: {empty: X}, each: P, inputs: {x: P}},"
        " b: {model: hinted, each: a.Y, inputs: {x: X, hint: a.Y}}, c: {model: double, inputs: {x: X}}}",
        ["b.Y", "c.Y"],
    )
    assert next(each.optional for each in steps.plan.outputs if each.name == "b.Y")
    assert await steps.answer(X=[1], P=[[1, 2]]) == ({"c.Y": [2]}, None)


@pytest.mark.parametrize("model", ["fails", "slow"])
async def test_an_optional_step_that_fails_or_is_late_is_named(model: str) -> None:
    steps = Steps(
        f"{{a: {{model: {model}, inputs: {{x: X}}, optional: true, timeout_s: 0.05}},"
        " b: {model: double, inputs: {x: X}}}",
        ["a.Y", "b.Y"],
    )
    assert await steps.answer(X=[1]) == ({"b.Y": [2], "skipped": [b"a"]}, None)
    assert ("a", "failed") in steps.outcomes


async def test_requests_with_failed_and_cancelled_steps_are_freed_without_a_garbage_collection() -> None:
    steps = Steps(
        "{a: {model: fails, each: P, inputs: {x: P}, optional: true},"
        " b: {model: fails, inputs: {x: X}, optional: true}, c: {model: slow, inputs: {x: X}},"
        " done: {when: {not_empty: X}, exit: done, after: [a, b]}}",
        ["a.Y", "b.Y", "c.Y"],
    )
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await steps.answer(X=[1], P=[[1, 2]]))[1] == "done"
        await asyncio.sleep(0)
        assert not [each for each in gc.get_objects() if type(each).__name__ == "_Run"]
    finally:
        gc.enable()


async def test_an_optional_step_does_not_outlast_the_request() -> None:
    steps = Steps("{a: {model: slow, inputs: {x: X}, optional: true}}", ["a.Y"])
    with pytest.raises(DeadlineExceeded):
        await steps.answer(within_s=0.1, X=[1])


@pytest.mark.parametrize(
    ("model", "error"), [("fails", ModelError), ("slow", DeadlineExceeded), ("square", ContractViolation)]
)
async def test_a_step_that_fails_ends_the_request_and_is_named(model: str, error: type[GatewayError]) -> None:
    steps = Steps(f"{{a: {{model: {model}, inputs: {{x: X}}}}, b: {{model: slow, inputs: {{x: X}}}}}}", ["a.Y", "b.Y"])
    with pytest.raises(error) as failed:
        await steps.answer(within_s=0.2, X=[1])
    assert failed.value.failed_step in ("a", "b")
    assert steps.models.cancelled == (["slow"] if model != "slow" else [])


async def test_a_caller_that_leaves_cancels_every_call() -> None:
    steps = Steps("{a: {model: slow, inputs: {x: X}}, b: {model: slow, inputs: {x: X}}}", ["a.Y", "b.Y"])
    task = asyncio.create_task(steps.answer(within_s=SLOW_S, X=[1]))
    await until(lambda: steps.models.running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.models.cancelled == ["slow", "slow"]


STREAM = (
    "{head: {model: double, inputs: {x: X}}, stream: {model: stream, inputs: {x: head.Y}},"
    " behind: {model: add, inputs: {a: stream.Y, b: head.Y}}"
)


async def test_the_steps_behind_a_stream_run_for_each_response() -> None:
    steps = Steps(STREAM + "}", ["head.Y", "behind.Y"])
    first, *others = await steps.events(X=[1.5])
    assert first == ({"head.Y": [3], "behind.Y": [3]}, None)
    assert others == [({"behind.Y": [4]}, None), ({"behind.Y": [5]}, None), ({}, None)]


async def test_a_stream_ends_early_at_an_exit_behind_it() -> None:
    steps = Steps(STREAM + ", full: {when: {at_least: [stream.Y, 1]}, exit: enough}}", ["stream.Y"])
    assert await steps.events(X=[50]) == [({"stream.Y": [0]}, None), ({"stream.Y": [1]}, None), ({}, "enough")]
    assert steps.models.cancelled == ["stream"]


async def test_a_step_behind_a_stream_without_responses_takes_another_source() -> None:
    steps = Steps(
        "{known: {model: double, inputs: {x: X}}, stream: {model: stream, when: {empty: X}, inputs: {x: X}},"
        " other: {model: other, inputs: {x: N}}, only: {model: double, inputs: {x: stream.Y}},"
        " behind: {model: double, inputs: {x: {first: [stream.Y, other.Y, known.Y]}}}}",
        ["behind.Y", "only.Y"],
    )
    assert await steps.events(X=[1], N=[0]) == [({"behind.Y": [4]}, None)]
    assert ("only", "skipped") in steps.outcomes
    assert await steps.events(X=[1], N=[2]) == [({"behind.Y": [0]}, None), ({"behind.Y": [2]}, None), ({}, None)]


async def test_each_event_names_its_own_skipped_steps_and_there_is_none_without_content() -> None:
    steps = Steps(
        "{stream: {model: stream, inputs: {x: X}}, behind: {model: fails, inputs: {x: stream.Y}, optional: true}}",
        ["stream.Y"],
    )
    event = {"stream.Y": [0], "skipped": [b"behind"]}
    assert await steps.events(X=[2]) == [(event, None), (event | {"stream.Y": [1]}, None), ({}, None)]


async def test_a_failure_behind_an_optional_stream_is_not_that_of_the_stream() -> None:
    steps = Steps(
        "{stream: {model: stream, inputs: {x: X}, optional: true}, behind: {model: fails, inputs: {x: stream.Y}}}",
        ["behind.Y"],
    )
    with pytest.raises(ModelError) as failed:
        await steps.events(X=[2])
    assert failed.value.failed_step == "behind"


async def test_an_event_does_not_change_when_the_memory_of_its_tensors_is_used_again() -> None:
    """The outputs of `head` stay in the engine's memory, from which `behind` reads them, until the request ends."""
    steps = Steps(STREAM + "}", ["head.Y", "behind.Y"])
    infer = steps.models.infer

    async def infer_and_keep(request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        response = await infer(request, deadline)
        if request.model == "double":
            kept = next(each for each in request.extensions if isinstance(each, KeptMemory))
            kept.releases.append(lambda: response.outputs["Y"].array.fill(-1))
        return response

    steps.models.infer = infer_and_keep  # type: ignore[method-assign]
    async with aclosing(steps.engine.infer_stream(steps.request(X=[1]), Deadline.after(5))) as responses:
        arrived = [response async for response in responses]
    assert values_of(arrived[0])["head.Y"] == [2]


async def test_only_one_of_two_streams_runs_and_a_step_behind_both_reads_it() -> None:
    steps = Steps(
        "{small: {model: stream, when: {equals: [N, 0]}, inputs: {x: X}},"
        " large: {model: other, when: {not: {equals: [N, 0]}}, inputs: {x: X}},"
        " copy: {model: scaled, inputs: {x: P, by: N}},"
        " behind: {model: double, inputs: {x: {first: [large.Y, small.Y]}}}}",
        ["behind.Y", ("large.Y", "small.Y")],
    )
    for number in (0, 1):
        events = await steps.events(X=[2], N=[number], P=[1, 2])
        text = "large.Y or small.Y"
        assert [each for each, _ in events] == [{"behind.Y": [0], text: [0]}, {"behind.Y": [2], text: [1]}, {}]
    assert {"stream", "other"} <= {*steps.calls}


async def test_two_streams_beside_each_other_have_their_own_steps_behind_them() -> None:
    steps = Steps(
        "{one: {model: stream, inputs: {x: X}}, two: {model: other, inputs: {x: X}},"
        " after_one: {model: double, inputs: {x: one.Y}}, after_two: {model: add, inputs: {a: two.Y, b: two.Y}},"
        " both: {model: double, inputs: {x: {first: [two.Y, one.Y]}}}}",
        ["after_one.Y", "after_two.Y", "both.Y"],
    )
    *events, last = await steps.events(X=[2])
    assert last == ({}, None)
    of_one = [each for each, _ in events if "after_one.Y" in each]
    assert of_one == [{"after_one.Y": [0], "both.Y": [0]}, {"after_one.Y": [2], "both.Y": [2]}]
    of_two = [each for each, _ in events if "after_two.Y" in each]
    assert of_two == [{"after_two.Y": [0], "both.Y": [0]}, {"after_two.Y": [2], "both.Y": [2]}]
    assert len(events) == 4
    assert steps.calls.count("double") == 6
    assert "skipped" not in {outcome for _, outcome in steps.outcomes}


async def test_a_chain_behind_both_of_two_streams_runs_for_each_response() -> None:
    steps = Steps(
        "{one: {model: stream, inputs: {x: X}}, two: {model: other, inputs: {x: X}},"
        " both: {model: double, inputs: {x: {first: [two.Y, one.Y]}}},"
        " next: {model: double, inputs: {x: {first: [both.Y, N]}}}}",
        ["next.Y"],
    )
    events = await steps.events(X=[2], N=[7])
    assert sorted(each["next.Y"] for each, _ in events if each) == [[0], [0], [4], [4]]


async def test_a_reader_that_leaves_a_stream_cancels_it() -> None:
    steps = Steps(STREAM + "}", ["behind.Y"])
    async with aclosing(steps.engine.infer_stream(steps.request(X=[500]), Deadline.after(5))) as responses:
        async for _ in responses:
            break
    await until(lambda: steps.slots.taken == 0)
    assert steps.models.running == 0
    assert len(steps.models.requests) < 60


async def test_callers_beside_each_other_get_their_own_answers() -> None:
    steps = Steps(
        "{a: {model: double, inputs: {x: X}}, none: {when: {any: {below: [a.Y, 0]}}, exit: negative},"
        " b: {model: add, inputs: {a: a.Y, b: X}, after: [none]}}",
        ["b.Y"],
    )
    requests = [steps.request(X=[number if number % 2 else -number - 1]) for number in range(64)]
    answers = await asyncio.gather(*(steps.engine.infer(each, Deadline.after(5)) for each in requests))
    for number, answer in enumerate(answers):
        expected = ({"b.Y": [3 * number]}, None) if number % 2 else ({}, "negative")
        assert (values_of(answer), answer.early_exit) == expected
    assert steps.models.running == steps.slots.taken == 0


SEEN = """
a: {model: double, inputs: {x: X}}
b: {model: row, each: P, inputs: {x: P}}
c: {model: double, when: {empty: a.Y}, inputs: {x: X}}
d: {model: fails, inputs: {x: a.Y}, optional: true}
late: {model: slow, inputs: {x: a.Y}}
e: {when: {not_empty: b.Y}, exit: enough}
"""


async def test_the_times_have_each_step_with_its_outcome_and_calls_have_its_name() -> None:
    steps = Steps(SEEN, ["a.Y", "late.Y"])
    request = steps.request(X=[1], P=np.ones((7, 2)))
    times = request.steps
    assert times is not None
    await steps.engine.infer(request, Deadline.after(5))
    assert {name: each.outcome for name, each in times.steps.items()} == {
        "a": "ok",
        "b": "ok",
        "c": "skipped",
        "d": "failed",
        "e": "exit",
        "late": "cancelled",
    }
    assert all(each.ended - each.started == pytest.approx(each.seconds) for each in times.steps.values())
    named = sorted(each.request_id.split(".")[1] for each in steps.models.requests)
    assert named == ["a", "b", "b", "b", "d", "late"]
    assert len({each.request_id for each in steps.models.requests}) == times.calls == len(named)
    slowest = max(times.steps, key=lambda name: times.steps[name].seconds)
    assert str(times).startswith(f", step;desc={slowest};dur=")


async def test_a_step_behind_a_stream_has_the_time_of_all_its_runs() -> None:
    steps = Steps("{a: {model: stream, inputs: {x: X}}, b: {model: double, inputs: {x: a.Y}}}", ["b.Y"])
    request = steps.request(X=[3])
    times = request.steps
    assert times is not None
    async with aclosing(steps.engine.infer_stream(request, Deadline.after(5))) as responses:
        assert len([each async for each in responses]) == 4
    assert (times.calls, len({each.request_id for each in steps.models.requests})) == (4, 4)
    assert times.steps["b"].seconds < times.steps["b"].ended - times.steps["b"].started
