"""Decides which tensors of a call use shared memory, and where they are in the call's region; the pool of regions.

A tensor uses shared memory only if Triton certainly no longer uses it after the end of the call. The size of an output
must also be known before the model runs, because Triton fails a call whose output does not fit, after the model ran.
"""

import errno
import fcntl
import math
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from app.core.inference import BYTES, DTYPE_BY_DATATYPE, InferenceRequest, Tensor
from app.core.model import ModelConfig, ModelKey, Step, walk


def ends_with_call(model: ModelKey, tensors: frozenset[str], configs: Mapping[ModelKey, ModelConfig]) -> bool:
    """Decides whether Triton no longer uses the tensors of a call after the call has ended.

    This is true for a model that is not an ensemble. An ensemble ends as soon as one step fails, while parallel steps
    continue. So each step that reads an input or writes an output of the call must not run in parallel with another
    step.

    ``tensors``: inputs and outputs of the model. Returns False for a model that is not in ``configs``.
    """
    config = configs.get(model)
    if config is None or not config.is_ensemble:
        return config is not None
    return not config.decoupled and all(
        _runs_alone(config.steps, i) and ends_with_call((step.model, step.version), touched, configs)
        for i, step in enumerate(config.steps)
        # the tensors of the step's model that are mapped to those of the ensemble
        if (touched := frozenset(name for name, tensor in (*step.input_map, *step.output_map) if tensor in tensors))
    )


def _runs_alone(steps: tuple[Step, ...], step: int) -> bool:
    """Whether no other step can run at the same time as this step."""
    indexes = range(len(steps))
    before = walk([step], lambda i: [j for j in indexes if _feeds(steps[j], steps[i])])
    after = walk([step], lambda i: [j for j in indexes if _feeds(steps[i], steps[j])])
    return len({*before, *after}) == len(steps)


def _feeds(first: Step, second: Step) -> bool:
    """Whether the second step reads a tensor that the first step writes."""
    written = {tensor for _, tensor in first.output_map}
    return any(tensor in written for _, tensor in second.input_map)


LARGE_BYTES = 512 * 1024
"""Smaller tensors gain little or nothing; docs/decisions/0012-shared-memory.md has the measurement."""
ALIGNMENT = 64
_NOWHERE: Mapping[int, int] = {}
_MOST_ELEMENTS = 64
"""A BYTES tensor with more elements gains little, because each element is copied separately."""

_Sizes = Sequence[tuple[str, int]]
"""Name and size in bytes of each tensor. The size is 0 for a tensor that is sent over gRPC."""


class ByteRange(NamedTuple):
    """A part of a region, in bytes."""

    offset: int
    size: int


class Layout(NamedTuple):
    """The spans of a call's tensors.

    ``inputs`` has a span for each input of the request, in order. ``outputs`` has all requested outputs, or is empty.
    The span is None for a tensor that is sent over gRPC. ``size`` is the size of the region in bytes; 0: no region.
    """

    inputs: tuple[ByteRange | None, ...]
    outputs: tuple[tuple[str, ByteRange | None], ...]
    size: int


class Layouts:
    """Computes layouts from the known configurations of models."""

    def __init__(self, max_call_bytes: int) -> None:
        """``max_call_bytes``: the large tensors of a call that have more are sent over the wire."""
        self._max_call_bytes = max_call_bytes
        self._configs: dict[ModelKey, ModelConfig] = {}
        self._outputs: dict[ModelKey, _Sizes] = {}
        """The sizes of one item if the model supports batching; 0 if the configuration does not determine a size."""
        self._is_suitable: dict[tuple[ModelKey, frozenset[str]], bool] = {}

    def learn(self, config: ModelConfig, version: str) -> None:
        key = (config.name, version)
        if self._configs.get(key) != config:
            self._configs[key] = config
            sizes = []
            for spec in config.outputs:
                dtype = DTYPE_BY_DATATYPE.get(spec.datatype)
                is_unknown = dtype is None or dtype.kind == "O" or min(spec.dims, default=-1) < 0
                sizes.append((spec.name, 0 if dtype is None or is_unknown else math.prod(spec.dims) * dtype.itemsize))
            self._outputs[key] = sizes
            self._is_suitable.clear()

    def layout_of(self, request: InferenceRequest, in_place: Mapping[int, int] = _NOWHERE) -> Layout | None:
        """Returns None if no tensor of the call is large, or if the model cannot use shared memory.

        ``in_place`` has the offset of each input that is already in the region of a body, by its position.
        """
        inputs = [(tensor.name, _raw_size(tensor)) for tensor in request.inputs]
        outputs = self._outputs_of(request)
        large = {name: size for name, size in (*inputs, *outputs) if size >= LARGE_BYTES}
        if not large or sum(large.values()) > self._max_call_bytes:
            return None
        key = (request.model, request.version), frozenset(large)
        if key not in self._is_suitable:
            self._is_suitable[key] = ends_with_call(*key, self._configs)
        if not self._is_suitable[key]:
            return None
        end = 0

        def span_of(size: int) -> ByteRange | None:
            nonlocal end
            if size < LARGE_BYTES:
                return None
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + size
            return ByteRange(start, size)

        spans = tuple(
            ByteRange(in_place[each], size) if each in in_place else span_of(size)
            for each, (_, size) in enumerate(inputs)
        )
        named = tuple((name, span_of(size)) for name, size in outputs)
        return Layout(spans, named if any(span for _, span in named) else (), end)

    def _outputs_of(self, request: InferenceRequest) -> _Sizes:
        key = (request.model, request.version)
        sizes = self._outputs.get(key, ())
        if sizes and request.outputs:
            known = dict(sizes)
            sizes = [(each.name, 0 if each.classification else known.get(each.name, 0)) for each in request.outputs]
        if not sizes or not self._configs[key].max_batch_size:
            return sizes
        shape = request.inputs[0].shape if request.inputs else ()
        return [(name, size * (shape[0] if shape else 0)) for name, size in sizes]


def _raw_size(tensor: Tensor) -> int:
    """Returns the size in Triton's raw form; 0 for a tensor that would not be faster through shared memory."""
    if tensor.datatype != BYTES:
        return tensor.array.nbytes
    if tensor.array.size > _MOST_ELEMENTS:
        return 0
    return sum(4 + len(element) for element in tensor.array.flat)


SHARED_MEMORY = Path("/dev/shm")
"""Triton opens a region with ``shm_open``, which uses only this folder."""
_PAGES_PER_SIZE = 8
_SMALLEST_STEP = 256 * 1024


class Region:
    """One region: a file in ``/dev/shm`` that the gateway creates, and that the gateway and Triton map.

    Has a file only from :meth:`allocate` to :meth:`unlink`; the mapping lives as long as this object.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.used_at = 0.0
        """When the last call returned the region, in monotonic seconds."""
        self._memory: mmap.mmap | None = None

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / self.name

    @property
    def view(self) -> memoryview:
        assert self._memory is not None, "allocate comes first"
        return memoryview(self._memory)

    def allocate(self) -> None:
        """Allocates all pages, because a missing page would later kill the process that accesses it. Raises OSError.

        Half of the file system stays free for the tensors of Python models.
        """
        system = os.statvfs(SHARED_MEMORY)
        if system.f_bavail * system.f_frsize - self.size < system.f_blocks * system.f_frsize // 2:
            raise OSError(errno.ENOSPC, f"half of {SHARED_MEMORY} has to stay free for the models")
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Removes the name. The memory stays while a process maps it. A no-op without a file."""
        self.path.unlink(missing_ok=True)


def rounded(size: int) -> int:
    """Rounds ``size`` up by at most a quarter, so that calls of similar size can share a region."""
    step = max(_SMALLEST_STEP, (1 << max(size - 1, 0).bit_length()) // _PAGES_PER_SIZE)
    return -(-size // step) * step


PREFIX = "triton_gateway_lane_"


class Owner:
    """Records which process owns a region, so that the next gateway can remove the regions of a killed gateway.

    Holds the lock of an empty file while the process runs. The kernel releases the lock when the process ends. A
    process id is not sufficient: gateways in different containers share ``/dev/shm``, but not their process ids.
    """

    def __init__(self) -> None:
        self._token = ""
        self._descriptor: int | None = None
        self._count = 0

    def next_name(self) -> str:
        """Returns a unique name. Raises OSError, also if another gateway removed the lock file before it was locked."""
        if self._descriptor is None:
            token = secrets.token_hex(8)
            path = _lock_file(token)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.stat()
            except OSError:
                os.close(descriptor)
                raise
            self._token, self._descriptor = token, descriptor
        self._count += 1
        return f"{PREFIX}{self._token}_{self._count}"

    def owns(self, name: str) -> bool:
        return self._descriptor is not None and _token_of(name) == self._token

    def release(self) -> None:
        """Removes every file of this owner."""
        if self._descriptor is not None:
            _remove_files(self._token)
            os.close(self._descriptor)
            self._descriptor = None


def is_abandoned(name: str) -> bool:
    """Whether a region with this name belongs to a gateway that no longer runs."""
    if not name.startswith(PREFIX):
        return False
    with _has_ended(_token_of(name)) as has_ended:
        return has_ended


def remove_leftovers() -> None:
    """Removes the files of gateways that no longer run."""
    for token in {_token_of(path.name) for path in SHARED_MEMORY.glob(f"{PREFIX}*")}:
        with _has_ended(token) as has_ended:
            if has_ended:
                _remove_files(token)


def _lock_file(token: str) -> Path:
    return SHARED_MEMORY / f"{PREFIX}{token}.lock"


@contextmanager
def _has_ended(token: str) -> Iterator[bool]:
    """Yields whether the process of this owner has ended. If so, holds its lock for the duration of the block."""
    try:
        descriptor = os.open(_lock_file(token), os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        yield isinstance(exc, FileNotFoundError)
        return
    try:
        has_ended = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            has_ended = False
        yield has_ended
    finally:
        os.close(descriptor)


def _remove_files(token: str) -> None:
    for path in SHARED_MEMORY.glob(f"{PREFIX}{token}*"):
        with suppress(OSError):
            path.unlink()


def _token_of(name: str) -> str:
    """Returns the owner's token in the name of a region or a lock file."""
    return name.removeprefix(PREFIX).partition("_")[0].partition(".")[0]


State = Literal["free", "used", "retired"]


class RegionPool:
    """Tracks all regions and their states; no I/O.

    Every region counts against ``limit`` from :meth:`add` to :meth:`drop`. A region is in use by one call, free, or
    retired. A retired region is never used again, because Triton may still read or write it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[Region, State] = {}

    def those(self, *states: State) -> list[Region]:
        return [region for region, state in self._states.items() if state in states]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The bytes that are free, in use, and retired."""
        states: tuple[State, State, State] = "free", "used", "retired"
        free, used, retired = (sum(region.size for region in self.those(state)) for state in states)
        return free, used, retired

    def has_room(self, size: int) -> bool:
        return sum(self.sizes) + size <= self._limit

    def add(self, region: Region) -> None:
        """Adds a new region, in use by a call."""
        self._states[region] = "used"

    def take(self, size: int, most: float = math.inf) -> Region | None:
        """Takes the smallest free region that is large enough and has at most ``most`` bytes."""
        fitting = [region for region in self.those("free") if size <= region.size <= most]
        region = min(fitting, key=lambda region: region.size, default=None)
        if region is not None:
            self._states[region] = "used"
        return region

    def give_back(self, region: Region) -> None:
        """Frees a region after Triton has answered the call. A no-op for a region that was retired in the meantime."""
        if self._states.get(region) == "used":
            region.used_at = time.monotonic()
            self._states[region] = "free"

    def retire(self, *regions: Region) -> None:
        self._states.update(dict.fromkeys(regions, "retired"))

    def retire_free(self, since: float = math.inf) -> None:
        """Retires the free regions that no call has used since then."""
        self.retire(*(region for region in self.those("free") if region.used_at <= since))

    def drop(self, region: Region) -> None:
        """Removes a region that Triton can no longer access, or that no call ever used."""
        self._states.pop(region, None)
