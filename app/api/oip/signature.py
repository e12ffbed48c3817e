"""What a model takes, compiled once for its configuration: inputs and outputs with their codecs, and parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from app.codecs.json_scan import MAX_DEPTH, has_more_elements
from app.codecs.kinds import fits, shape_text, to_array_of
from app.codecs.numbers import NumberCodec, number_codec, read_numbers
from app.core import inference
from app.core.engine import PipelineLayer
from app.core.errors import InvalidInput, InvalidJson
from app.core.model import ModelConfig, TensorSpec
from app.core.text import shown
from app.observability.metrics import NO_PIPELINE
from app.pipelines.body import LARGE_BYTES
from app.pipelines.models import OipModel
from app.pipelines.pipeline import Target
from app.pipelines.spec import RESERVED_PARAMETERS

MAX_ELEMENTS = 65_536
"""Limit for BYTES tensors, because an element needs more memory than its bytes, and for sizes of empty tensors."""
_MAX_DIMENSIONS = 32
MAX_PARAMETERS = 64
MAX_NAME = 128
MAX_TEXT = 4096

_NUMBER, _BOOLEAN = ((int,), "unsigned-integer"), ((bool,), "boolean")
_TYPES_BY_NAME: Mapping[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "unsigned-integer"),
    "sequence_start": _BOOLEAN,
    "sequence_end": _BOOLEAN,
    "priority": _NUMBER,
    "timeout": _NUMBER,
}
"""Triton's sequence and schedule policy extensions. Every other parameter that Triton interprets is refused."""
_parameter = msgspec.json.Decoder(bool | int | float | str)
_KEPT_IN_BODY = 4096
"""Elements of at least this size are not copied out of the body."""
_texts = msgspec.json.Decoder(list[str])
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape."
)
"""A model with batches is the usual reason for a wrong rank."""


class Input:
    """``dims``: with the batch dimension; -1 means any size. ``itemsize``: of an element, in bytes; 0 for BYTES."""

    def __init__(self, spec: TensorSpec, config: ModelConfig) -> None:
        self.spec, self.model, self.max_batch_size = spec, config.name, config.max_batch_size
        self.dims = ((-1,) if config.max_batch_size else ()) + spec.dims
        self._of_model = f"'{spec.name}' for model '{config.name}'"
        self._numbers: NumberCodec | None = None
        if spec.datatype in inference.DTYPE_BY_DATATYPE and spec.datatype != inference.BYTES:
            self._numbers = number_codec(spec.datatype, to_array_of("number", spec.datatype), takes_literals=True)
        self.itemsize = 0 if self._numbers is None else self._numbers.dtype.itemsize

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises InvalidInput."""
        if not fits(shape, self.dims):
            expected, got = shape_text(self.dims), shape_text(shape[:_MAX_DIMENSIONS])
            text = f"unexpected shape for input {self._of_model}. Expected {expected}, got {got}."
            raise InvalidInput(f"{text}{_BATCH_NOTE}" if self.max_batch_size else text)
        if self.max_batch_size and not 1 <= shape[0] <= self.max_batch_size:
            bound = f"<= {self.max_batch_size}" if shape[0] else ">= 1"
            raise InvalidInput(f"inference request batch-size must be {bound} for '{self.model}'")
        if len(shape) > _MAX_DIMENSIONS or (0 in shape and math.prod(filter(None, shape)) > MAX_ELEMENTS):
            raise self._refused("has a shape that is not possible")

    def of_json(self, text: memoryview, shape: tuple[int, ...] | None = None) -> inference.Tensor:
        """Raises InvalidInput or InvalidJson.

        ``text``: lists of the elements, flat or nested; without a shape, one flat list of any number of elements.
        """
        head = bytes(text[: 2 * MAX_DEPTH]).translate(None, b" \t\r\n")
        depth, is_large = min(len(head) - len(head.lstrip(b"[")), MAX_DEPTH), len(text) >= LARGE_BYTES
        if shape is None and depth != 1:
            raise self._refused("has nested lists; expected a flat list")

        def check_count(sent: tuple[int, ...]) -> None:
            """Called before any number of a large text is decoded."""
            if shape is not None and math.prod(sent) != math.prod(shape):
                expected = f"Expected {math.prod(shape)} elements for shape {list(shape)}, got {math.prod(sent)}."
                same = "Shape does not match true shape of 'data' field"
                raise InvalidInput(f"Unable to parse 'data': {same} of input '{self.spec.name}'. {expected}")

        try:
            if self._numbers is not None:
                is_small = depth == 1 and not is_large
                decode = self._numbers.decode
                array = decode(bytes(text)) if is_small else read_numbers(text, depth, self._numbers, check_count)
            elif is_large and has_more_elements(text, MAX_ELEMENTS):
                raise self._refused(f"has more than {MAX_ELEMENTS} elements")
            elif depth == 1:
                values = _texts.decode(text)
                array = inference.bytes_array([value.encode("utf-8") for value in values], (len(values),))
            elif not 1 <= depth <= _MAX_DIMENSIONS:
                raise ValueError
            else:
                nested: Any = str
                for _ in range(depth):
                    nested = list[nested]
                array = to_array_of("text", inference.BYTES)(msgspec.json.decode(text, type=nested))
        except msgspec.ValidationError as exc:
            raise self._refused(f"has data that are not {self.spec.datatype}, or out of its range") from exc
        except msgspec.DecodeError as exc:
            raise not_json() from exc
        except ValueError as exc:
            raise self._refused("has data that cannot be read: lists of different lengths, or no lists") from exc
        check_count((array.size,))
        return self._tensor(array if shape is None else array.reshape(shape))

    def of_bytes(self, raw: memoryview, shape: tuple[int, ...]) -> inference.Tensor:
        """``raw``: the elements in row-major order, little-endian; it is not copied. Raises InvalidInput.

        Each element of a BYTES tensor follows its length in 4 bytes.
        """
        count = math.prod(shape)
        if self._numbers is not None:
            expected = count * self.itemsize
            if len(raw) != expected:
                of_input = f"for input {self._of_model}. Expected {expected}, got {len(raw)}"
                raise InvalidInput(f"input byte size mismatch {of_input}")
            return self._tensor(np.frombuffer(raw, self._numbers.dtype).reshape(shape))
        if count > MAX_ELEMENTS:
            raise self._refused(f"has more than {MAX_ELEMENTS} elements")
        elements, is_whole = inference.elements_in(raw, count)
        if len(elements) > count:
            expecting = f"{self._of_model}, expecting {count}"
            raise InvalidInput(f"unexpected number of string elements {len(elements)} for inference input {expecting}")
        if not is_whole:
            raise self._refused("has texts whose lengths do not match its bytes")
        if len(elements) < count:
            got = f"{self._of_model}, got {len(elements)}"
            raise InvalidInput(f"expected {count} string elements for inference input {got}")
        return self.of_elements(elements, shape)

    def of_elements(self, elements: Sequence[memoryview], shape: tuple[int, ...]) -> inference.Tensor:
        """The tensor of the datatype BYTES. Filled one by one, because numpy would read a memoryview as an array."""
        array = np.empty(len(elements), dtype=np.object_)
        for index, element in enumerate(elements):
            array[index] = bytes(element) if len(element) < _KEPT_IN_BODY else element
        return self._tensor(array.reshape(shape))

    def _tensor(self, array: inference.Array) -> inference.Tensor:
        return inference.Tensor(self.spec.name, self.spec.datatype, array)

    def _refused(self, problem: str) -> InvalidInput:
        return InvalidInput(f"Input '{self.spec.name}' {problem}.")


class Signature(Target):
    """A model that callers call by its own name, under no pipeline's name."""

    def __init__(self, model: OipModel, layers: tuple[PipelineLayer, ...]) -> None:
        config = model.config
        super().__init__(NO_PIPELINE, model.spec, config, model.models)
        self.layers, self.sequence_ids = layers, replace(self.sequence_ids, reserved=model.reserved)
        self.inputs = {spec.name: Input(spec, config) for spec in config.inputs}
        self.required = frozenset(spec.name for spec in config.inputs if not spec.optional)
        self.outputs = {spec.name: spec for spec in config.outputs}
        self.takes_bytes = any(spec.datatype == inference.BYTES for spec in config.inputs)
        """Whether an input has the datatype BYTES, whose elements are read one by one."""

    def request_of(
        self,
        inputs: Sequence[inference.Tensor],
        version: str,
        parameters: Mapping[str, inference.Parameter],
        outputs: Iterable[inference.RequestedOutput] = (),
    ) -> inference.InferenceRequest:
        """Checks the parameters, that no input is missing or given twice, and that the batch sizes agree.

        Raises InvalidInput.
        """
        names, model = [tensor.name for tensor in inputs], self.config.name
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"input '{twice}' already exists in request")
        if missing := self.required.difference(names):
            least, most = len(self.required), len(self.inputs)
            expected = f"{least} inputs" if least == most else f"number of inputs between {least} and {most}"
            got, lacks = ("[" + ",".join(f"'{each}'" for each in some[:16]) + "]" for some in (names, sorted(missing)))
            raise InvalidInput(
                f"expected {expected} but got {len(names)} inputs for model '{model}'. Got input(s) {got}, but missing "
                f"required input(s) {lacks}. Please provide all required input(s)."
            )
        if self.config.max_batch_size and len({tensor.shape[0] for tensor in inputs}) > 1:
            raise InvalidInput(f"The inputs for model '{model}' have different batch sizes.")
        if len(parameters) > MAX_PARAMETERS:
            raise InvalidInput(f"The request has more than {MAX_PARAMETERS} parameters.")
        for name, value in parameters.items():
            _check_parameter(name, value)
        self.sequence_ids.check(parameters.get("sequence_id", 0))
        request = inference.InferenceRequest(
            model=model,
            version=version,
            inputs=tuple(inputs),
            parameters=dict(parameters),
            outputs=tuple(outputs),
            takes_traceparent=self.takes_traceparent,
            idempotent=self.spec.idempotent,
            ends_by_hook=self.spec.cancel is not None,
        )
        for layer in self.layers:
            layer.check(request)
        return request

    def unexpected(self, what: Literal["input", "output"], name: str) -> InvalidInput:
        """The error for a name that the model does not have."""
        has = ", ".join(list(self.inputs if what == "input" else self.outputs)[:16]) or "none"
        text = f"unexpected inference {what} '{shown(name)}' for model '{self.config.name}'; it has {has}."
        return InvalidInput(text)


def parameter_of(name: str, text: memoryview) -> inference.Parameter:
    """Raises InvalidInput or InvalidJson."""
    try:
        value: inference.Parameter = _parameter.decode(text)
    except msgspec.ValidationError as exc:
        raise InvalidInput(
            f"parameter '{shown(name)}' has invalid type. It should be either 'int', 'float', 'bool', or 'string'."
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidJson("The body is not JSON.") from exc
    return value


def _check_parameter(name: str, value: inference.Parameter) -> None:
    if name in _TYPES_BY_NAME:
        types, expected = _TYPES_BY_NAME[name]
        if type(value) not in types or (type(value) is int and value < 0):
            raise InvalidInput(f"Unable to parse '{name}': attempt to access JSON non-{expected} as {expected}")
    elif name.startswith("triton_"):
        raise InvalidInput(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified. "
            f"The request has '{shown(name)}'."
        )
    elif RESERVED_PARAMETERS.fullmatch(name) or name == "traceparent":
        raise InvalidInput(f"parameter '{shown(name)}' is reserved and should not be specified.")
    if not (0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable()):
        raise InvalidInput(
            f"parameter '{shown(name)}' has an invalid name; expected 1 to {MAX_NAME} printable characters of ASCII."
        )
    if isinstance(value, str) and (len(value) > MAX_TEXT or "\0" in value):  # Triton truncates text at a NUL
        raise InvalidInput(f"parameter '{shown(name)}' must have at most {MAX_TEXT} characters, and no NUL.")
    if isinstance(value, int | float) and not -(2**63) <= value < 2**63 and name != "sequence_id":
        raise InvalidInput(f"parameter '{shown(name)}' is a number beyond 64 bits.")


def not_json() -> InvalidJson:
    return InvalidJson("failed to parse the request JSON buffer: it is not JSON.")
