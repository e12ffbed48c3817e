"""The requests that ``gateway.yaml`` declares for a pipeline, its ``sample`` and its ``examples``, with their files."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from app.files.document import read_regular_file
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import SAMPLE, PipelineSpec

MAX_FILE_BYTES = 64 * 1024 * 1024
"""gRPC's limit for what Triton is sent."""

Values = Mapping[str, Any]
"""JSON values by field name. A file is a path, relative to the folder of ``gateway.yaml``."""


def declared_requests(spec: PipelineSpec) -> dict[str, Values]:
    """Returns the values by name: the sample first, then the examples in the order of the file."""
    sample = {} if spec.sample is None else {SAMPLE: spec.sample}
    return {**sample, **spec.examples}


def paths_in(pipeline: Pipeline, values: Values) -> dict[str, str]:
    """Returns path by field name, for the fields that are files."""
    given = {field.name: values.get(field.name) for field in pipeline.inputs if field.is_file}
    return {name: path for name, path in given.items() if isinstance(path, str)}


def body_of(pipeline: Pipeline, values: Values, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The JSON body of a request with the values. ``folder``: what the paths of files are relative to.

    Raises OSError for a file that cannot be read, TypeError or ValueError for a value that has no JSON form.
    """
    paths = paths_in(pipeline, values)
    return body_with(
        pipeline, values, {name: read_regular_file(folder / path, max_file_bytes) for name, path in paths.items()}
    )


def body_with(pipeline: Pipeline, values: Values, files: Mapping[str, bytes]) -> bytes:
    """As ``body_of``, for files that were read: content by field name."""
    for field in pipeline.inputs:
        if field.is_file and field.name in values and field.name not in files:
            raise TypeError(f"'{field.name}' is not the path of a file")
    encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return orjson.dumps({**values, **encoded})


def sample_body(pipeline: Pipeline, folder: Path) -> bytes:
    """See ``body_of``."""
    return body_of(pipeline, pipeline.spec.sample or {}, folder)
