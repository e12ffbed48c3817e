"""A pipeline's sample, run before the pipeline counts as ready: no caller waits for a model's first-time work."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.pipelines.declared import sample_body
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import run


async def run_sample(engine: Engine, pipeline: Pipeline, folder: Path) -> None:
    """``folder``: what the paths of files are relative to. Raises GatewayError, OSError, TypeError or ValueError."""
    body = await asyncio.to_thread(sample_body, pipeline, folder)
    request = replace(pipeline.request_of_json(body), is_probe=True)
    await run(engine, pipeline, request, Deadline.after(pipeline.timeout_s))
