"""Requests share calls, and each caller gets its own rows, whatever happens to the call and to the other callers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.coalescing.rows import Coalescing, key_of
from app.coalescing.shared_calls import (
    PAUSE_S,
    SPLITS,
    CoalescingEngine,
    SharedCallMetrics,
    for_one_of_several,
)
from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    Rejected,
    TooManyRequests,
    Unavailable,
    UpstreamError,
    UpstreamUnavailable,
)
from app.core.inference import (
    Deadline,
    InferenceRequest,
    InferenceResponse,
    Parameter,
    RequestedOutput,
    Tensor,
    TraceContext,
    bytes_array,
)
from app.observability.metrics import Metrics
from app.triton.grpc_errors import is_dead_process
from tests.toolkit.engine import (
    Distort,
    Outputs,
    RowEngine,
    error_of,
    every_error,
    failed,
    items_of,
    rows_of,
    with_rows,
    without_text,
)
from tests.toolkit.simulated_clock import on_a_simulated_clock

MOST_CALLS = 29
"""For 64 requests that share a call and include one that fails."""
OUTPUTS = {"NEGATIVE": (1,), "TEXT": (1,)}


class Counted(SharedCallMetrics):
    def __init__(self) -> None:
        metrics = Metrics("0")
        super().__init__(metrics.counter, metrics.histogram)
        self.calls: list[tuple[int, int]] = []
        self.repeats = 0

    def called(self, model: str, items: int, requests: int) -> None:
        self.calls.append((items, requests))

    def repeated(self, model: str, calls: int = 1) -> None:
        self.repeats += calls


class Bench:
    """A coalescing engine over a scripted one, and the coalescing of the only pipeline."""

    def __init__(
        self,
        engine: RowEngine | None = None,
        *,
        calls: int = 1,
        max_items: int = 64,
        outputs: Mapping[str, tuple[int, ...]] = OUTPUTS,
    ) -> None:
        self.inner = engine or RowEngine()
        self.counted = Counted()
        self.engine = CoalescingEngine(self.inner, lambda _model, _steps: calls, self.counted, is_dead_process)
        self.coalescing = Coalescing("p", max_items, 1024 * 1024, outputs)
        self.coalescing.prove("1")

    def request(
        self, *items: int, model: str = "m", parameters: dict[str, Parameter] | None = None
    ) -> InferenceRequest:
        array = np.array([[item] for item in items], np.int64)
        request = InferenceRequest(
            model, (Tensor("ITEM", "INT64", array),), parameters=parameters or {}, idempotent=True
        )
        return self.coalescing.extended(request)

    async def infer(self, *items: int, timeout_s: float = 10.0) -> InferenceResponse:
        return await self.engine.infer(self.request(*items), Deadline.after(timeout_s))

    def start(self, *items: int, timeout_s: float = 10.0) -> asyncio.Task[InferenceResponse]:
        return asyncio.create_task(self.infer(*items, timeout_s=timeout_s))

    async def results(self, items: Iterable[int]) -> list[InferenceResponse | BaseException]:
        return await asyncio.gather(*map(self.infer, items), return_exceptions=True)

    @property
    def is_idle(self) -> bool:
        model = self.engine.of_model("m")
        return not model.running and not model.waiting


def are_answers_of(responses: Iterable[object], items: Iterable[int]) -> bool:
    return all(is_answer_of(response, item) for response, item in zip(responses, items, strict=True))


def is_answer_of(response: object, *items: int) -> bool:
    if not isinstance(response, InferenceResponse):
        return False
    negative, text = response.outputs["NEGATIVE"].array, response.outputs["TEXT"].array
    return negative.tolist() == [[-item] for item in items] and text.tolist() == [[b"of %d" % item] for item in items]


@on_a_simulated_clock
async def test_with_a_free_slot_a_request_goes_at_once() -> None:
    bench = Bench(calls=2)
    request = bench.request(7)
    assert is_answer_of(await bench.engine.infer(request, Deadline.after(1)), 7)
    assert bench.inner.requests == [request], "unchanged, with its own id"
    assert request.extensions[0].sent_as is None
    assert bench.counted.calls == [(1, 1)]


@on_a_simulated_clock
async def test_requests_that_wait_share_a_call_and_get_their_own_rows() -> None:
    bench = Bench(calls=2)
    assert are_answers_of(await bench.results(range(20)), range(20))
    assert bench.inner.sizes == [1, 1, 18]
    assert bench.inner.most_running == 2
    assert bench.counted.calls == [(1, 1), (1, 1), (18, 18)]
    assert bench.is_idle


@on_a_simulated_clock
async def test_the_bounds_of_items_and_bytes_hold() -> None:
    bench = Bench(max_items=8)
    assert are_answers_of(await bench.results(range(30)), range(30))
    assert max(bench.inner.sizes) == 8
    bench.coalescing.max_bytes = 3 * 8
    bench.inner.requests.clear()
    assert are_answers_of(await bench.results(range(30)), range(30))
    assert max(bench.inner.sizes) == 3


@on_a_simulated_clock
async def test_other_requests_go_before_those_above_the_bounds_of_a_call() -> None:
    bench = Bench(max_items=2)
    requests = [*map(bench.request, range(5)), bench.request(5, parameters={"beam": 2})]
    results = await asyncio.gather(*(bench.engine.infer(each, Deadline.after(1)) for each in requests))
    assert are_answers_of(results, range(6))
    assert [items_of(call) for call in bench.inner.requests] == [[0], [1, 2], [5], [3, 4]]


DIFFERENT: dict[str, Callable[[InferenceRequest], InferenceRequest]] = {
    "model": lambda request: replace(request, model="other"),
    "version": lambda request: replace(request, version="2"),
    "outputs": lambda request: replace(request, outputs=(RequestedOutput("TEXT"),)),
    "classification": lambda request: replace(request, outputs=(RequestedOutput("NEGATIVE", 1),)),
    "parameter": lambda request: replace(request, parameters={"beam": 2}),
    "integer and boolean": lambda request: replace(request, parameters={"beam": True}),
    "integer and number": lambda request: replace(request, parameters={"beam": 1.0}),
    "text": lambda request: replace(request, parameters={"beam": "1"}),
    "priority": lambda request: replace(request, parameters={"priority": 1}),
    "name": lambda request: replace(request, inputs=(Tensor("OTHER", "INT64", request.inputs[0].array),)),
    "datatype": lambda request: replace(
        request, inputs=(Tensor("ITEM", "INT32", request.inputs[0].array.astype(np.int32)),)
    ),
    "shape": lambda request: replace(
        request, inputs=(Tensor("ITEM", "INT64", np.repeat(request.inputs[0].array, 2, axis=1)),)
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_different_requests_have_different_keys(difference: str) -> None:
    request = Bench().request(1, parameters={"beam": 1})
    keys = {key_of(request), key_of(DIFFERENT[difference](request))}
    assert len(keys) == 2
    assert key_of(request) == key_of(replace(request, request_id="x", trace=TraceContext("1" * 32, "2" * 16, 1)))
    assert len({key_of(change(request)) for change in DIFFERENT.values()}) == len(DIFFERENT)


@on_a_simulated_clock
async def test_the_memory_of_a_caller_that_left_may_be_used_again() -> None:
    """The rows of a call are copies: a body's memory belongs to another caller when its caller leaves."""
    bench = Bench(RowEngine(service_s=1.0))
    first = bench.start(0)
    await asyncio.sleep(0)
    number, text = np.frombuffer(bytearray((5).to_bytes(8, "little")), np.int64).reshape(1, 1), bytearray(b"secret")
    inputs = (Tensor("ITEM", "INT64", number), Tensor("NOTE", "BYTES", bytes_array([memoryview(text)], (1, 1))))
    request = replace(bench.request(5), inputs=inputs)
    tasks = [asyncio.create_task(bench.engine.infer(request, Deadline.after(10))) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    number[0, 0], text[:] = 6, b"others"
    await asyncio.sleep(1.5)
    (_, call) = bench.inner.requests
    assert call.inputs[0].array.tolist() == [[5]]
    assert call.inputs[1].array.tolist() == [[b"secret"]]
    await asyncio.gather(first, tasks[1])


@on_a_simulated_clock
async def test_pipelines_over_one_model_share_no_call() -> None:
    bench = Bench()
    other = Coalescing("other", 64, 1024 * 1024, OUTPUTS)
    other.prove("1")
    requests = [bench.request(item) for item in range(5)]
    requests[3:] = [
        replace(each, extensions=other.extended(replace(each, extensions=())).extensions) for each in requests[3:]
    ]
    results = await asyncio.gather(*(bench.engine.infer(each, Deadline.after(1)) for each in requests))
    assert are_answers_of(results, range(5))
    assert [items_of(call) for call in bench.inner.requests] == [[0], [1, 2], [3, 4]]


@on_a_simulated_clock
async def test_one_bad_item_fails_alone_within_the_budget() -> None:
    bench = Bench(RowEngine(bad={40}))
    results = await bench.results(range(65))
    failure = results.pop(40)
    assert are_answers_of(results, [*range(40), *range(41, 65)])
    assert isinstance(failure, ModelError)
    assert failure.upstream == UpstreamError("INTERNAL", "item 40 is bad"), "its own error, whole"
    assert len(bench.inner.requests) - 1 == 13 <= MOST_CALLS
    assert bench.is_idle


@on_a_simulated_clock
async def test_many_bad_items_stay_within_the_budget_and_get_no_text_of_others() -> None:
    bench = Bench(RowEngine(bad=set(range(1, 65))))
    results = await bench.results(range(65))
    assert len(bench.inner.requests) - 1 <= MOST_CALLS
    for item, result in enumerate(results[1:], 1):
        assert isinstance(result, ModelError)
        assert result.upstream in (None, UpstreamError("INTERNAL", f"item {item} is bad"))


@on_a_simulated_clock
async def test_an_item_that_kills_the_process_is_not_sent_again() -> None:
    bench = Bench(RowEngine(killers={40}))
    results = await bench.results(range(65))
    assert is_answer_of(results[0], 0)
    assert all(isinstance(result, ModelNotReady) for result in results[1:])
    assert sum(40 in items_of(call) for call in bench.inner.requests) == 1
    assert len(set(map(id, results[1:]))) == 64, "each its own error, which its pipeline may complete"


@pytest.mark.parametrize(
    "error",
    [
        TooManyRequests("The model's queue in Triton is full."),
        UpstreamUnavailable("Triton cannot be reached."),
        ModelNotReady("Triton has no ready version of the model."),
        DeadlineExceeded("Model 'm' did not answer before the deadline."),
        failed("stopped", "CANCELLED"),
        failed("in ensemble 'e', Stub process 'm_0_0' is not healthy."),
        failed("in ensemble 'e', a script called m: Stub process 'm_0_0' is not healthy."),
    ],
    ids=lambda error: f"{type(error).__name__} {error.upstream}",
)
@on_a_simulated_clock
async def test_failures_that_concern_everybody_are_not_repeated(error: GatewayError) -> None:
    bench = Bench(RowEngine(error=error))
    results = await bench.results(range(9))
    assert all(type(result) is type(error) for result in results)
    assert bench.inner.sizes == [1, 8]
    assert bench.counted.repeats == 0


@on_a_simulated_clock
async def test_the_call_of_several_is_not_idempotent_and_has_its_own_id() -> None:
    """Nothing below sends the items of several callers again. The trace is that of a sampled request."""
    bench = Bench()
    traces = [None, None, TraceContext("1" * 32, "2" * 16, 0), TraceContext("3" * 32, "4" * 16, 1)]
    requests = [replace(bench.request(item), trace=trace) for item, trace in enumerate(traces)]
    await asyncio.gather(*(bench.engine.infer(each, Deadline.after(1)) for each in requests))
    call = bench.inner.requests[1]
    assert (call.idempotent, call.extensions, call.trace) == (False, (), traces[3])
    assert call.request_id not in {each.request_id for each in requests}
    for each in requests[1:]:
        sent_as = each.extensions[0].sent_as
        assert (sent_as.notes, sent_as.request_id, sent_as.trace) == ({"shared_with": 2}, call.request_id, traces[3])


def without_rows(outputs: Outputs) -> Outputs:
    scalar = Tensor("TEXT", "INT64", np.array(1))
    return outputs if outputs["TEXT"].shape[0] == 1 else {**outputs, "TEXT": scalar}


HOSTILE: dict[str, tuple[Distort, str]] = {
    "a row dropped": (with_rows(lambda items: items[:-1]), "NEGATIVE"),
    "a row too many": (with_rows(lambda items: [*items, items[0]]), "NEGATIVE"),
    "one row for all": (with_rows(lambda items: items[:1]), "NEGATIVE"),
    "an output left out": (without_text, "TEXT"),
    "an output without dimensions": (without_rows, "TEXT"),
}


@pytest.mark.parametrize("habit", HOSTILE)
@on_a_simulated_clock
async def test_a_call_with_other_rows_answers_no_request(habit: str, caplog: pytest.LogCaptureFixture) -> None:
    distort, output = HOSTILE[habit]
    bench = Bench(RowEngine(distort=distort))
    assert are_answers_of(await bench.results(range(9)), range(9))
    assert bench.inner.sizes == [1, 8] + [1] * 8
    assert bench.coalescing.fault.tensor == output
    assert not bench.coalescing.is_on
    bench.coalescing.prove("1")
    assert not bench.coalescing.is_on, "a second trial does not take back what a call has shown"
    assert bench.coalescing.fault.tensor == output
    assert are_answers_of(await bench.results(range(9)), range(9))
    assert bench.inner.sizes[10:] == [1] * 9, "no call is shared any more"
    assert [items for items, _ in bench.counted.calls] == bench.inner.sizes, "each call is counted"
    assert [output in record.getMessage() for record in caplog.records] == [True]


def flat(outputs: Outputs) -> Outputs:
    return {name: Tensor(name, each.datatype, each.array[:, 0]) for name, each in outputs.items()}


def detections(outputs: Outputs) -> Outputs:
    """None for odd items and two for even ones: a call may have as many rows as items by accident."""
    found = [[item] for item in rows_of(outputs) for _ in range(0 if item % 2 else 2)]
    return outputs | {"BOXES": Tensor("BOXES", "INT64", np.array(found, np.int64).reshape(-1, 1))}


@pytest.mark.parametrize(
    ("distort", "negative", "sizes", "fault"),
    [
        (flat, (1,), [1, 8], None),
        (flat, (-1,), [1] * 9, "output 'NEGATIVE' has the shape [1] for 1 rows of [-1]"),
        (detections, (1,), [1] * 9, "output 'BOXES' has the shape [2, 1] for 1 rows"),
    ],
    ids=["argmax(1) for the dims [1]", "elements of one row or of several", "other rows for one request"],
)
@on_a_simulated_clock
async def test_rows_without_their_dimension_of_size_1_are_cut_if_they_can_only_be_rows(
    distort: Distort, negative: tuple[int], sizes: list[int], fault: str | None
) -> None:
    """Otherwise already the first answer shows that the calls must not be shared."""
    bench = Bench(RowEngine(distort=distort), outputs={"NEGATIVE": negative, "TEXT": (1,)})
    for item, result in enumerate(await bench.results(range(9))):
        assert isinstance(result, InferenceResponse)
        assert result.outputs["NEGATIVE"].array.ravel().tolist() == [-item]
    assert bench.inner.sizes == sizes
    assert bench.coalescing.fault is None if fault is None else fault in bench.coalescing.fault.text


@on_a_simulated_clock
async def test_coalescing_ends_for_every_pipeline_over_the_model() -> None:
    bench = Bench(RowEngine(distort=without_text))
    await bench.results(range(5))
    other = Coalescing("p", 64, 1024, OUTPUTS)
    other.prove("1")
    bench.coalescing = other
    bench.inner.requests.clear()
    await bench.results(range(5))
    assert bench.inner.sizes == [1] * 5


@on_a_simulated_clock
async def test_a_version_without_a_trial_answers_no_shared_call() -> None:
    bench = Bench(calls=1)
    first = bench.start(0)
    await asyncio.sleep(0)
    waiting = asyncio.gather(*map(bench.infer, range(1, 5)))
    await asyncio.sleep(0.006)
    bench.inner.version, bench.inner.distort = "2", with_rows(lambda items: items[::-1])
    assert is_answer_of(await first, 0)
    assert are_answers_of(await waiting, range(1, 5))
    assert bench.inner.sizes == [1, 4, 1, 1, 1, 1]
    assert bench.coalescing.needs_trial


@on_a_simulated_clock
async def test_a_new_version_is_noticed_by_a_request_alone() -> None:
    bench = Bench(RowEngine(version="2"))
    await bench.infer(1)
    assert bench.coalescing.needs_trial
    bench.coalescing.prove("2")
    assert are_answers_of(await bench.results(range(5)), range(5))
    assert max(bench.inner.sizes) == 4


@on_a_simulated_clock
async def test_a_deadline_concerns_only_its_own_caller() -> None:
    bench = Bench(RowEngine(service_s=1.0))
    first = bench.start(0)
    await asyncio.sleep(0)
    tasks = [first, bench.start(1, timeout_s=1.5), bench.start(2, timeout_s=0.5), bench.start(3)]
    zero, one, two, three = await asyncio.gather(*tasks, return_exceptions=True)
    assert are_answers_of((zero, three), (0, 3))
    assert (type(one), type(two)) == (DeadlineExceeded, DeadlineExceeded)
    assert [items_of(call) for call in bench.inner.requests] == [[0], [1, 3]]
    assert len(bench.inner.cancelled) == 0


@on_a_simulated_clock
async def test_only_the_last_caller_that_leaves_cancels_the_call() -> None:
    bench = Bench(RowEngine(service_s=1.0))
    tasks = [bench.start(item) for item in range(4)]
    await asyncio.sleep(1.5)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert len(bench.inner.cancelled) == 0
    assert is_answer_of(await tasks[2], 2)

    tasks = [bench.start(item) for item in range(4)]
    await asyncio.sleep(1.5)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert len(bench.inner.cancelled) == 1
    assert bench.is_idle


@on_a_simulated_clock
async def test_the_last_to_leave_cancels_also_a_call_for_a_half() -> None:
    """The other half has its answers already."""
    bench = Bench(RowEngine(service_s=1.0, bad={4}))
    tasks = [bench.start(item) for item in range(5)]
    await asyncio.sleep(3.5)  # 0; 1 to 4; 1 and 2; now 3 and 4 are under way
    assert [items_of(call) for call in bench.inner.requests] == [[0], [1, 2, 3, 4], [1, 2], [3, 4]]
    for task in tasks[3:]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert are_answers_of(results[:3], range(3))
    assert len(bench.inner.cancelled) == 1
    assert bench.is_idle


@on_a_simulated_clock
async def test_requests_of_a_model_that_often_fails_share_no_calls_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(RowEngine(bad={3}))
    for _ in range(SPLITS):
        await bench.results(range(5))
    bench.inner.requests.clear()
    await bench.results(range(5))
    assert bench.inner.sizes == [1] * 5
    await asyncio.sleep(PAUSE_S)
    bench.inner.requests.clear()
    await bench.results([0, 1, 2, 4])
    assert bench.inner.sizes == [1, 3]
    assert len(caplog.records) == 1


@on_a_simulated_clock
async def test_an_unexpected_exception_fails_all_and_frees_the_slot() -> None:
    def broken(outputs: Outputs) -> Outputs:
        raise ZeroDivisionError

    bench = Bench()
    first = bench.start(0)
    await asyncio.sleep(0)
    waiting = asyncio.create_task(bench.results([1, 2]))
    await asyncio.sleep(0.006)
    bench.inner.distort = broken
    assert is_answer_of(await first, 0)
    assert all(isinstance(result, ZeroDivisionError) for result in await waiting)
    assert bench.is_idle


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_the_copy_of_an_error_has_no_text_of_another_caller(kind: type[GatewayError]) -> None:
    error = error_of(kind, "detail")
    if isinstance(error, Unavailable):
        error.was_answered = True
    error.upstream = UpstreamError("INTERNAL", "the text of somebody")
    own = for_one_of_several(error)
    assert type(own) is kind
    assert own is not error
    assert own.upstream is (error.upstream if issubclass(kind, Rejected | DeadlineExceeded) else None)
    assert (own.detail, str(own), own.retry_after_s) == (error.detail, str(error), error.retry_after_s)
    own.hint = "changed"
    assert error.hint is None


@dataclass(frozen=True)
class Client:
    arrives_ms: int
    rows: int
    habit: str
    leaves_ms: int | None
    timeout_ms: int
    beam: int


CLIENTS = st.lists(
    st.builds(
        Client,
        arrives_ms=st.integers(0, 40),
        rows=st.integers(1, 4),
        habit=st.sampled_from(["good"] * 12 + ["bad", "killer"]),
        leaves_ms=st.sampled_from([None, None, None, 0, 1, 5, 8, 15]),
        timeout_ms=st.sampled_from([50, 60, 100, 1000, 1000, 1000]),
        beam=st.sampled_from([0, 0, 0, 1]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    clients=CLIENTS,
    calls=st.integers(1, 3),
    max_items=st.sampled_from([4, 8, 64]),
    service_ms=st.sampled_from([3, 10, 30]),
)
@on_a_simulated_clock
async def test_no_answer_ever_reaches_the_wrong_caller(
    clients: list[Client], calls: int, max_items: int, service_ms: int
) -> None:
    """Random arrivals, failures, deaths of the process, cancellations and deadlines."""
    owned = [list(range(100 * number, 100 * number + client.rows)) for number, client in enumerate(clients, 1)]
    by_habit = {
        habit: {item for client, items in zip(clients, owned, strict=True) if client.habit == habit for item in items}
        for habit in ("bad", "killer")
    }
    engine = RowEngine(bad=by_habit["bad"], killers=by_habit["killer"], service_s=service_ms / 1000)
    bench = Bench(engine, calls=calls, max_items=max_items)

    async def visit(client: Client, items: list[int]) -> InferenceResponse:
        await asyncio.sleep(client.arrives_ms / 1000)
        request = bench.request(*items, parameters={"beam": client.beam})
        return await bench.engine.infer(request, Deadline.after(client.timeout_ms / 1000))

    async def leave(client: Client, task: asyncio.Task[InferenceResponse]) -> None:
        if client.leaves_ms is not None:
            await asyncio.sleep((client.arrives_ms + client.leaves_ms) / 1000)
            task.cancel()

    tasks = [asyncio.create_task(visit(*each)) for each in zip(clients, owned, strict=True)]
    leaving = [asyncio.create_task(leave(*each)) for each in zip(clients, tasks, strict=True)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*leaving)
    await asyncio.sleep(1)

    seen_beams = [{clients[item // 100 - 1].beam for item in items_of(call)} for call in engine.requests]
    assert all(len(beams) == 1 for beams in seen_beams)
    assert all(
        sum(items[0] in items_of(call) for call in engine.requests) <= 1
        for items in owned
        if items[0] in by_habit["killer"]
    )
    for client, items, result in zip(clients, owned, results, strict=True):
        if isinstance(result, InferenceResponse):
            assert is_answer_of(result, *items)
            assert client.habit == "good"
        elif isinstance(result, ModelError):
            assert client.habit == "bad" or (result.upstream is None and by_habit["bad"])
            assert result.upstream is None or int(result.upstream.message.split()[1]) in items
        elif isinstance(result, asyncio.CancelledError):
            assert client.leaves_ms is not None
        elif isinstance(result, DeadlineExceeded):
            assert client.timeout_ms < 1000 or len(clients) * service_ms > 300
        else:
            assert isinstance(result, ModelNotReady)
            assert by_habit["killer"]
    assert bench.is_idle
    assert engine.running == 0


def test_tensors_in_the_memory_of_a_body_are_copied() -> None:
    body = bytearray(np.arange(4, dtype=np.float32).tobytes())
    texts = bytes_array([memoryview(bytearray(b"text"))], (1,))  # type: ignore[list-item]
    own = np.arange(4, dtype=np.float32)
    shared = [np.frombuffer(body, np.float32), np.frombuffer(body, np.float32).reshape(2, 2)[:1]]
    for array in (*shared, own, own.reshape(2, 2)[np.newaxis]):
        (tensor,) = InferenceRequest("m", (Tensor("X", "FP32", array),)).owned().inputs
        assert not np.shares_memory(tensor.array, np.frombuffer(body, np.float32))
        assert np.shares_memory(tensor.array, own) == np.shares_memory(array, own)
        np.testing.assert_array_equal(tensor.array, array)
    (tensor,) = InferenceRequest("m", (Tensor("X", "BYTES", texts),)).owned().inputs
    assert [type(element) for element in tensor.array] == [bytes]
