"""The inputs and outputs of a model, compiled once for its configuration: names, datatypes, shapes, codecs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from app.api.oip.oip_parameters import checked
from app.codecs.json_scan import MAX_DEPTH, has_more_elements
from app.codecs.kinds import fits, shape_text, to_array_of
from app.codecs.numbers import NumberCodec, NumberLists, number_codec
from app.core.engine import PipelineLayer
from app.core.errors import InvalidInput, InvalidJson
from app.core.inference import (
    BYTES,
    DTYPE_BY_DATATYPE,
    Array,
    InferenceRequest,
    Parameter,
    RequestedOutput,
    Tensor,
    bytes_array,
    elements_in,
)
from app.core.model import ModelConfig, TensorSpec
from app.core.text import shown
from app.observability.metrics import NO_PIPELINE
from app.pipelines.body import LARGE_BYTES
from app.pipelines.models import OipModels, RequestRules
from app.pipelines.pipeline import Target
from app.pipelines.spec import STREAM_DEFAULTS, PipelineSpec

MAX_ELEMENTS = 65_536
"""Limit for BYTES tensors, because an element needs more memory than its bytes, and for sizes of empty tensors."""
_MAX_DIMENSIONS = 32
_KEPT_IN_BODY = 4096
"""Elements of at least this size are not copied out of the body."""
_texts = msgspec.json.Decoder(list[str])


@dataclass(frozen=True, slots=True)
class Input:
    spec: TensorSpec
    dims: tuple[int, ...]
    """Includes the batch dimension; -1 means any size."""
    max_batch_size: int
    model: str
    _numbers: NumberCodec | None
    """None for BYTES."""

    @classmethod
    def compile(cls, spec: TensorSpec, config: ModelConfig) -> "Input":
        max_batch_size = config.max_batch_size
        dims = ((-1,) if max_batch_size else ()) + spec.dims
        is_number = spec.datatype in DTYPE_BY_DATATYPE and spec.datatype != BYTES
        to_array = to_array_of("number", spec.datatype) if is_number else None
        numbers = number_codec(spec.datatype, to_array, takes_literals=True) if to_array is not None else None
        return cls(spec, dims, max_batch_size, config.name, numbers)

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes; 0 for BYTES."""
        return 0 if self._numbers is None else self._numbers.dtype.itemsize

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises InvalidInput."""
        if not fits(shape, self.dims):
            expected, got = shape_text(self.dims), shape_text(shape[:_MAX_DIMENSIONS])
            raise InvalidInput(
                f"unexpected shape for input {self._of_model}. Expected {expected}, got {got}.{self._note}"
            )
        if self.max_batch_size and not 1 <= shape[0] <= self.max_batch_size:
            bound = f"<= {self.max_batch_size}" if shape[0] else ">= 1"
            raise InvalidInput(f"inference request batch-size must be {bound} for '{self.model}'")
        if len(shape) > _MAX_DIMENSIONS or (0 in shape and math.prod(filter(None, shape)) > MAX_ELEMENTS):
            raise self._refused("has a shape that is not possible")

    def of_json(self, text: memoryview, shape: tuple[int, ...]) -> Tensor:
        """``text``: lists of the elements, flat or nested. Raises InvalidInput or InvalidJson."""
        array = self._elements_of(text, shape)
        if array.size != math.prod(shape):
            raise self._other_count(array.size, shape)
        return self._tensor(array.reshape(shape))

    def of_list(self, text: memoryview) -> Tensor:
        """``text``: a flat list of any number of elements. Raises InvalidInput or InvalidJson."""
        if _depth_of(text) != 1:
            raise self._refused("has nested lists; expected a flat list")
        return self._tensor(self._elements_of(text, None))

    def _elements_of(self, text: memoryview, shape: tuple[int, ...] | None) -> Array:
        try:
            return self._texts_of(text) if self._numbers is None else self._numbers_of(text, self._numbers, shape)
        except msgspec.ValidationError as exc:
            raise self._refused(f"has data that are not {self.spec.datatype}, or out of its range") from exc
        except msgspec.DecodeError as exc:
            raise not_json() from exc
        except ValueError as exc:
            raise self._refused("has data that cannot be read: lists of different lengths, or no lists") from exc

    def of_bytes(self, raw: memoryview, shape: tuple[int, ...]) -> Tensor:
        """``raw``: the elements in row-major order, little-endian; it is not copied. Raises InvalidInput."""
        if self._numbers is None:
            return self._tensor(_object_array(self._elements_in(raw, math.prod(shape)), shape))
        dtype = self._numbers.dtype
        if len(raw) != math.prod(shape) * dtype.itemsize:
            expected = math.prod(shape) * dtype.itemsize
            raise InvalidInput(
                f"input byte size mismatch for input {self._of_model}. Expected {expected}, got {len(raw)}"
            )
        return self._tensor(np.frombuffer(raw, dtype).reshape(shape))

    def of_element(self, element: memoryview, shape: tuple[int, ...]) -> Tensor:
        """The tensor of the datatype BYTES with this one element."""
        kept = bytes(element) if len(element) < _KEPT_IN_BODY else element
        return self._tensor(_object_array([kept], shape))

    def _numbers_of(self, text: memoryview, numbers: NumberCodec, shape: tuple[int, ...] | None) -> Array:
        if len(text) < LARGE_BYTES and _depth_of(text) == 1:
            return numbers.decode(bytes(text))
        return NumberLists(_depth_of(text), numbers, lambda sent: self._check_count(sent, shape)).read(text)

    def _check_count(self, sent: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
        """Called before any number is decoded. Raises InvalidInput."""
        if shape is not None and math.prod(sent) != math.prod(shape):
            raise self._other_count(math.prod(sent), shape)

    def _texts_of(self, text: memoryview) -> Array:
        if len(text) >= LARGE_BYTES and has_more_elements(text, MAX_ELEMENTS):
            raise self._refused(f"has more than {MAX_ELEMENTS} elements")
        if _depth_of(text) == 1:
            values = _texts.decode(text)
            return bytes_array([value.encode("utf-8") for value in values], (len(values),))
        return to_array_of("text", BYTES)(msgspec.json.decode(text, type=_nested_texts(_depth_of(text))))

    def _elements_in(self, raw: memoryview, count: int) -> Sequence[bytes | memoryview]:
        """Returns the elements of a BYTES tensor, each preceded by its length in 4 bytes. Raises InvalidInput."""
        if count > MAX_ELEMENTS:
            raise self._refused(f"has more than {MAX_ELEMENTS} elements")
        elements, is_whole = elements_in(raw, count)
        if len(elements) > count:
            expecting = f"{self._of_model}, expecting {count}"
            raise InvalidInput(f"unexpected number of string elements {len(elements)} for inference input {expecting}")
        if not is_whole:
            raise self._refused("has texts whose lengths do not match its bytes")
        if len(elements) < count:
            got = f"{self._of_model}, got {len(elements)}"
            raise InvalidInput(f"expected {count} string elements for inference input {got}")
        return [bytes(element) if len(element) < _KEPT_IN_BODY else element for element in elements]

    @property
    def _of_model(self) -> str:
        return f"'{self.spec.name}' for model '{self.model}'"

    @property
    def _note(self) -> str:
        """A model with batches is the usual reason for a wrong rank."""
        if not self.max_batch_size:
            return ""
        return (
            " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
            "to each input shape."
        )

    def _other_count(self, count: int, shape: tuple[int, ...]) -> InvalidInput:
        text = "Unable to parse 'data': Shape does not match true shape of 'data' field"
        expected = f"Expected {math.prod(shape)} elements for shape {list(shape)}, got {count}."
        return InvalidInput(f"{text} of input '{self.spec.name}'. {expected}")

    def _tensor(self, array: Array) -> Tensor:
        return Tensor(self.spec.name, self.spec.datatype, array)

    def _refused(self, problem: str) -> InvalidInput:
        return InvalidInput(f"Input '{self.spec.name}' {problem}.")


@dataclass(frozen=True, eq=False, kw_only=True)
class Signature(Target):
    """A model that callers call by its own name, under no pipeline's name."""

    inputs: Mapping[str, Input]
    required: frozenset[str]
    outputs: Mapping[str, TensorSpec]
    rules: RequestRules

    @classmethod
    def compile(cls, model: str, models: OipModels, layers: tuple[PipelineLayer, ...] = ()) -> "Signature":
        """Raises UnknownModel or ModelNotReady."""
        config, rules = models.config(model), models.rules(model)
        never_s = 2 * STREAM_DEFAULTS.timeout_s  # the status of a stream is that of its first output
        stream = STREAM_DEFAULTS.model_copy(update={"first_output_s": rules.first_output_s, "commit_s": never_s})
        return cls(
            name=NO_PIPELINE,
            spec=PipelineSpec(model=model, stream=stream, cancel=rules.cancel),
            config=config,
            capacity=models.capacity(model),
            layers=layers,
            inputs={spec.name: Input.compile(spec, config) for spec in config.inputs},
            required=frozenset(spec.name for spec in config.inputs if not spec.optional),
            outputs={spec.name: spec for spec in config.outputs},
            rules=rules,
        )

    def request_of(
        self,
        inputs: Sequence[Tensor],
        version: str,
        parameters: Mapping[str, Parameter],
        outputs: Iterable[RequestedOutput] = (),
    ) -> InferenceRequest:
        """Raises InvalidInput."""
        return InferenceRequest(
            model=self.config.name,
            version=version,
            inputs=tuple(inputs),
            parameters=checked(parameters, self.rules.sequence_ids),
            outputs=tuple(outputs),
            takes_traceparent=self.rules.takes_traceparent,
            idempotent=self.rules.idempotent,
            ends_by_hook=self.rules.cancel is not None,
        )

    @property
    def takes_bytes(self) -> bool:
        """Whether an input has the datatype BYTES, whose elements are read one by one."""
        return any(each.spec.datatype == BYTES for each in self.inputs.values())

    def check_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Checks that no input is missing or given twice, and that the batch sizes agree. Raises InvalidInput."""
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"input '{twice}' already exists in request")
        if missing := self.required.difference(names):
            least, most = len(self.required), len(self.inputs)
            expected = f"{least} inputs" if least == most else f"number of inputs between {least} and {most}"
            raise InvalidInput(
                f"expected {expected} but got {len(names)} inputs for model '{self.config.name}'. Got input(s) "
                f"{_quoted(names)}, but missing required input(s) {_quoted(sorted(missing))}. Please provide all "
                "required input(s)."
            )
        if self.config.max_batch_size and len({tensor.shape[0] for tensor in tensors}) > 1:
            raise InvalidInput(f"The inputs for model '{self.config.name}' have different batch sizes.")

    def input(self, name: str) -> Input:
        """Raises InvalidInput."""
        found = self.inputs.get(name)
        if found is None:
            raise InvalidInput(
                f"unexpected inference input '{shown(name)}' for model '{self.config.name}'{_listed(self.inputs)}"
            )
        return found

    def output(self, name: str) -> TensorSpec:
        """Raises InvalidInput."""
        found = self.outputs.get(name)
        if found is None:
            raise InvalidInput(
                f"unexpected inference output '{shown(name)}' for model '{self.config.name}'{_listed(self.outputs)}"
            )
        return found


def not_json() -> InvalidJson:
    return InvalidJson("failed to parse the request JSON buffer: it is not JSON.")


def _quoted(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names[:16]) + "]"


def _listed(names: Mapping[str, object]) -> str:
    return f"; it has {', '.join(list(names)[:16]) or 'none'}."


def _depth_of(text: memoryview) -> int:
    """The number of leading opening brackets, at most MAX_DEPTH."""
    head = bytes(text[: 2 * MAX_DEPTH]).translate(None, b" \t\r\n")
    return min(len(head) - len(head.lstrip(b"[")), MAX_DEPTH)


def _nested_texts(depth: int) -> object:
    """The type of texts in lists that are nested ``depth`` deep. Raises ValueError for no list, or too many."""
    if not 1 <= depth <= _MAX_DIMENSIONS:
        raise ValueError
    nested: object = str
    for _ in range(depth):
        nested = list[nested]  # type: ignore[valid-type]
    return nested


def _object_array(elements: Sequence[bytes | memoryview], shape: tuple[int, ...]) -> Array:
    """Filled one by one, because numpy would read a memoryview as an array."""
    array = np.empty(len(elements), dtype=np.object_)
    for index, element in enumerate(elements):
        array[index] = element
    return array.reshape(shape)
