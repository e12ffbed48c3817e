"""A pipeline's sample, run before the pipeline counts as ready: no caller waits for a model's first-time work."""

import asyncio
import base64
from pathlib import Path

import orjson
from msgspec.structs import replace

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.files.document import read_regular_file
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import run

MAX_FILE_BYTES = 64 * 1024 * 1024
"""gRPC's limit for what Triton is sent."""


async def run_sample(engine: Engine, pipeline: Pipeline, folder: Path) -> None:
    """``folder``: what the paths of files are relative to. Raises GatewayError, OSError, TypeError or ValueError."""
    body = await asyncio.to_thread(sample_body, pipeline, folder)
    request = replace(pipeline.request_of_json(body), is_probe=True)
    await run(engine, pipeline, request, Deadline.after(pipeline.timeout_s))


def sample_body(pipeline: Pipeline, folder: Path) -> bytes:
    """The sample as the JSON body of a request.

    Raises OSError for a file that cannot be read, TypeError or ValueError for a value that has no JSON form.
    """
    files = {field.name for field in pipeline.inputs if field.is_file}
    return orjson.dumps(
        {
            name: base64.b64encode(read_regular_file(folder / value, MAX_FILE_BYTES)).decode()
            if name in files
            else value
            for name, value in (pipeline.spec.sample or {}).items()
        }
    )
