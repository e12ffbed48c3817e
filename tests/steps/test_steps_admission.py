"""Steps in the queues of their models: no order of requests locks them, and those under way go first."""

import asyncio
import random
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from app.admission.admission import Admission
from app.admission.keys import ANYONE
from app.admission.scheduler import Slot
from app.core.inference import Deadline, InferenceRequest, Tensor
from app.core.model import Capacity
from app.steps.plan import PlannedStep, Source
from app.steps.planner import Planner
from app.steps.steps_engine import StepsEngine
from app.steps.steps_spec import StepSpec
from tests.toolkit.numpy_models import NumpyEngine, numpy_model

MODELS = {
    each.config.name: each
    for each in [
        numpy_model("one", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: {"Y": x}),
        numpy_model("two", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: {"Y": x}),
        numpy_model("row", ["x FP32 [1]"], ["Y FP32 [1]"], lambda x: {"Y": x}),
        numpy_model("stream", ["x FP32 [-1]"], ["Y FP32 [-1]"], lambda x: [{"Y": x}] * 3, decoupled=True),
    ]
}
REQUESTS = 24


def graph_of(rng: random.Random) -> dict[str, Any]:
    """A graph whose steps call the same few models in any order, beside and behind each other."""
    steps: dict[str, Any] = {"first": {"model": "one", "inputs": {"x": "X"}}}
    plain, behind, stream = ["X", "first.Y"], list[str](), ""
    for number in range(rng.randint(2, 8)):
        name, source = f"s{number}", rng.choice([*plain, *behind])
        kind = rng.choice(["one", "two", "row", "stream", "exit"])
        if kind == "exit":
            steps[name] = {"when": {"any": {"below": [source, rng.random()]}}, "exit": "low"}
        elif kind == "stream" and not stream and source in plain:
            steps[name], stream = {"model": "stream", "inputs": {"x": source}}, name
            behind.append(f"{name}.Y")
        elif kind in ("one", "two"):
            steps[name] = {"model": kind, "inputs": {"x": source}, "optional": rng.random() < 0.3}
            (behind if source in behind else plain).append(f"{name}.Y")
        else:
            steps[name] = {"model": "row", "each": "P", "inputs": {"x": "P"}, "in_flight": rng.randint(1, 4)}
    return steps


@pytest.mark.parametrize("seed", range(60))
async def test_no_order_of_requests_locks_models_with_one_slot(seed: int) -> None:
    rng = random.Random(seed)
    admission, one = Admission(), Capacity()
    models = NumpyEngine(MODELS, pause=lambda _: rng.random() * 0.002)

    def enter(step: PlannedStep, deadline: Deadline) -> Any:
        return admission.queue_of(step.config.name, one, 1).of_steps.enter_again(deadline)

    engine = StepsEngine(models, enter)
    configs = {name: each.config for name, each in MODELS.items()}
    plans = []
    for number in range(3):
        specs = {name: StepSpec.model_validate(each) for name, each in graph_of(rng).items()}
        leaves = [Source((f"{name}.Y",)) for name, each in specs.items() if each.model is not None]
        plans.append(Planner(specs, configs).planned(f"p{number}", dict.fromkeys(leaves, ())))

    async def request() -> None:
        plan = rng.choice(plans)
        name = plan.name
        x = np.asarray([rng.random()], np.float32)
        tensors = (Tensor("X", "FP32", x), Tensor("P", "FP32", np.zeros((rng.randint(0, 4), 1), np.float32)))
        sent, deadline = plan.extended(InferenceRequest(name, tensors)), Deadline.after(30)
        slot = await admission.of(name, name, one, 4).claim_of(ANYONE).enter(deadline)
        try:
            if not plan.decoupled:
                await engine.infer(sent, deadline)
            else:
                async with aclosing(engine.infer_stream(sent, deadline)) as responses:
                    async for _ in responses:
                        await asyncio.sleep(rng.random() * 0.002)
        finally:
            slot.leave()

    tasks = [asyncio.create_task(request()) for _ in range(REQUESTS)]
    for task in rng.sample(tasks, 6):
        await asyncio.sleep(0.001)
        task.cancel()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in results} <= {type(None), asyncio.CancelledError}
    assert all(each.running == 0 and not each.has_waiters for each in admission.model_queues.values())
    assert models.running == 0


async def test_a_step_goes_before_requests_that_have_not_begun() -> None:
    admission, order, deadline = Admission(), list[str](), Deadline.after(5)
    new = admission.of("p", "one", Capacity(), 1).claim_of(ANYONE)
    running = new.try_enter()
    assert running is not None

    async def enter(name: str, waiting: Any) -> None:
        slot: Slot = await waiting
        order.append(name)
        slot.leave()

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(enter(f"new {number}", new.enter(deadline)))
            await asyncio.sleep(0)
        group.create_task(enter("step", admission.queue_of("one", Capacity(), 1).of_steps.enter_again(deadline)))
        await asyncio.sleep(0)
        running.leave()
    assert order == ["step", "new 0", "new 1", "new 2"]
