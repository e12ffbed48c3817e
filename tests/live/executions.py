"""Counts of Triton's metrics page."""

import httpx

from app.triton.embedded.server import EmbeddedTriton


def executions(triton: EmbeddedTriton, model: str, metric: str = "nv_inference_exec_count") -> int:
    """Returns a count of a model, over all its versions. Fails for a model that the page does not have."""
    lines = httpx.get(str(triton.metrics_url)).text.splitlines()
    counts = [int(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{metric}{{model="{model}"')]
    assert counts, f"Triton's page has no {metric} of {model}"
    return sum(counts)
