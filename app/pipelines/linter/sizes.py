"""Checks of the sizes that a configuration declares: dimensions and batches."""

import math
from collections.abc import Iterator

from app.domain.model import ModelConfig
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import Models
from app.pipelines.shapes import shape_text

LARGEST_BATCH = 65_536
MOST_ELEMENTS = 2**31 - 1
_FREE = -1


def invalid_sizes(models: Models) -> Iterator[Finding]:
    for model, config in models.items():
        if config.max_batch_size < 0:
            text = f"max_batch_size is {config.max_batch_size}, and must be 0 or more"
            yield Finding(Code.INVALID_SIZE, text, model)
        for tensor, dims in _tensors_of(config):
            if any(dim < 1 and dim != _FREE for dim in dims):
                text = f"'{tensor}' has the dims {shape_text(dims)}: each must be 1 or more, or -1 for any size"
                yield Finding(Code.INVALID_SIZE, text, model, tensor=tensor)


def excessive_sizes(models: Models) -> Iterator[Finding]:
    for model, config in models.items():
        if config.max_batch_size > LARGEST_BATCH:
            text = f"max_batch_size is {config.max_batch_size}, more than {LARGEST_BATCH}"
            yield Finding(Code.EXCESSIVE_SIZE, text, model)
        for tensor, dims in _tensors_of(config):
            if math.prod(dim for dim in dims if dim > 0) > MOST_ELEMENTS:
                text = f"'{tensor}' has the dims {shape_text(dims)}: more than {MOST_ELEMENTS} elements"
                yield Finding(Code.EXCESSIVE_SIZE, text, model, tensor=tensor)


def _tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((spec.name, spec.dims) for spec in (*config.inputs, *config.outputs))
