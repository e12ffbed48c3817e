"""Counts of Triton's metrics page."""

import time
from collections.abc import Callable
from statistics import median

import httpx

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.waiting import eventually


def executions(triton: EmbeddedTriton, model: str, metric: str = "nv_inference_exec_count") -> int:
    """Returns a count of a model, over all its versions. Fails for a model that the page does not have."""
    lines = httpx.get(str(triton.metrics_url)).text.splitlines()
    counts = [int(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{metric}{{model="{model}"')]
    assert counts, f"Triton's page has no {metric} of {model}"
    return sum(counts)


def settled_executions(triton: EmbeddedTriton, model: str, metric: str = "nv_inference_exec_count") -> int:
    """Returns the count when it has not changed for 0.3 s: Triton counts a request a moment after its answer."""
    counts = [executions(triton, model, metric)]

    def is_settled() -> bool:
        time.sleep(0.3)
        counts.append(executions(triton, model, metric))
        return counts[-1] == counts[-2]

    eventually(is_settled)
    return counts[-1]


def check_usually_below(bound: float, measure: Callable[[], float]) -> None:
    """Fails unless the first value, or the median of five, is below the bound.

    For values that depend on how fast the machine takes a cancellation to Triton: another program can delay one, but
    not most of them.
    """
    values = [measure()]
    if values[0] >= bound:
        values += [measure() for _ in range(4)]
    assert median(values) < bound, f"the median of {values} is not below {bound}"
