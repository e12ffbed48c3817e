"""Checks of what flows along an edge: datatype, shape, batch, and how many responses it comes with.

The rules are those by which Triton 2.51 loads and runs an ensemble, observed on the server: where only one end of an
edge has a batch dimension, it takes the dimension away or adds one, as long as the batch is of one.
"""

from collections.abc import Iterator, Set

from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import End, Place, Wiring
from app.pipelines.shapes import shape_text

_FREE = -1


def mismatches(wiring: Wiring) -> Iterator[Finding]:
    for tensor, writer, reader in wiring.edges():
        if found := _mismatch(tensor, writer, reader, wiring.config.max_batch_size):
            code, text = found
            where = reader.place or writer.place
            yield Finding(code, text, wiring.name, where.number if where else None, tensor)


def batch_sizes(wiring: Wiring) -> Iterator[Finding]:
    size = wiring.config.max_batch_size
    for place in wiring.places:
        if place.config is not None and 0 < place.config.max_batch_size < size:
            text = f"{place} takes batches of {place.config.max_batch_size} at most, the ensemble of {size}"
            yield Finding(Code.BATCH_MISMATCH, text, wiring.name, place.number)


def decoupled_joins(wiring: Wiring, decoupled: Set[str]) -> Iterator[Finding]:
    """A step whose inputs come with different numbers of responses, or such outputs of the ensemble."""
    origin: dict[str, Place | None] = {spec.name: None for spec in wiring.config.inputs}
    for place in wiring.runnable():
        tensors = [tensor for _, tensor in place.step.input_map]
        if found := _join(wiring, tensors, origin, place):
            yield found
        own = place if place.step.model in decoupled else None
        inherited = origin[tensors[0]] if tensors else None
        origin |= {tensor: own or inherited for _, tensor in place.step.output_map}
    outputs = [spec.name for spec in wiring.config.outputs if spec.name in origin]
    if found := _join(wiring, outputs, origin, None):
        yield found


def unordered_streams(wiring: Wiring, decoupled: Set[str]) -> Iterator[Finding]:
    streamed: set[str] = set()
    for place in wiring.runnable():
        reads_stream = any(tensor in streamed for _, tensor in place.step.input_map)
        if reads_stream and place.config is not None and place.config.instance_count > 1:
            count = place.config.instance_count
            text = f"{place} has {count} instances behind a decoupled step: responses may arrive in the wrong order"
            yield Finding(Code.UNORDERED_STREAM, text, wiring.name, place.number)
        if reads_stream or place.step.model in decoupled:
            streamed |= {tensor for _, tensor in place.step.output_map}


def routers_needed(wiring: Wiring) -> Iterator[Finding]:
    """A shared tensor that a Python model may read in GPU memory, see docs/reference/checks/router-needed.md."""
    for tensor, readers in wiring.readers.items():
        steps = [end.place for end in readers if end.place is not None]
        for place in steps if len(steps) > 1 else ():
            if place.config is not None and place.config.parameter("FORCE_CPU_ONLY_INPUT_TENSORS") == "no":
                text = (
                    f"{place} may read '{tensor}' in GPU memory shared with other steps: in-place changes affect them"
                )
                yield Finding(Code.ROUTER_NEEDED, text, wiring.name, place.number, tensor)


def _mismatch(tensor: str, writer: End, reader: End, largest_batch: int) -> tuple[Code, str] | None:
    given, wanted = writer.spec, reader.spec
    if given is None or wanted is None:
        return None
    if given.datatype != wanted.datatype:
        return Code.DATATYPE_MISMATCH, _difference(tensor, writer, reader, given.datatype, wanted.datatype)
    if _agree(_whole(writer, given.dims), _whole(reader, wanted.dims)):
        return None
    shapes = shape_text(given.dims), shape_text(wanted.dims)
    if not _agree(given.dims, wanted.dims):
        return Code.SHAPE_MISMATCH, _difference(tensor, writer, reader, *shapes)
    if writer.is_batched and not reader.is_batched and largest_batch > 1:
        sides = (f"up to {largest_batch} of {shapes[0]}", f"one {shapes[1]}: a batch of one fits, a larger one fails")
        return Code.BATCH_MISMATCH, _difference(tensor, writer, reader, *sides)
    return None


def _difference(tensor: str, writer: End, reader: End, given: str, wanted: str) -> str:
    return f"{writer} gives '{tensor}' as {given}, {reader} takes {wanted}"


def _join(wiring: Wiring, tensors: list[str], origin: dict[str, Place | None], place: Place | None) -> Finding | None:
    first = next((tensor for tensor in tensors if origin[tensor] is not None), None)
    other = next((tensor for tensor in tensors if first and origin[tensor] != origin[first]), None)
    if first is None or other is None:
        return None
    text = (
        f"{place or 'the ensemble itself'} joins '{first}', which comes with every response of {origin[first]}, with "
        f"'{other}', which does not: {origin[first]} must write '{other}' with each response too"
    )
    return Finding(Code.DECOUPLED_JOIN, text, wiring.name, place.number if place else None, other)


def _whole(end: End, dims: tuple[int, ...]) -> tuple[int, ...]:
    return (_FREE, *dims) if end.is_batched else dims


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or _FREE in (a, b) for a, b in zip(one, other, strict=True))
