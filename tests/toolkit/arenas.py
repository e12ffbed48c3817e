"""Locks the arenas of glibc's malloc in another process, as a thread does that is interrupted inside malloc."""

import io
import struct
from collections.abc import Iterator
from pathlib import Path

_HEAP_BYTES = 64 * 2**20
"""Heaps of arenas begin at multiples of this address. Source: HEAP_MAX_SIZE in glibc's arena.c, on 64-bit machines."""
_NEXT = 2160
"""Offset of ``next`` in ``malloc_state``, which begins with the lock. Source: malloc.c of glibc 2.26 and newer."""


def lock_arenas(pid: int, count: int | None = None) -> int:
    """Locks ``count`` arenas of the process, the main one last; None: all. Returns how many were locked."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        arenas = list(_arenas(memory, next(_heaps(pid))))[:count]
        for arena in arenas:
            memory.seek(arena)
            memory.write(struct.pack("i", 1))
    return len(arenas)


def _heaps(pid: int) -> Iterator[int]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start = int(line.partition("-")[0], 16)
        if start % _HEAP_BYTES == 0 and " rw-p 00000000 00:00 0" in line:
            yield start


def _arenas(memory: io.FileIO, heap: int) -> Iterator[int]:
    """Follows the circular list of arenas from the one of a heap. The main arena, in libc itself, comes last."""
    first = _word(memory, heap)
    arenas = [first]
    while (arena := _word(memory, arenas[-1] + _NEXT)) != first:
        arenas.append(arena)
    yield from sorted(arenas, key=lambda arena: arena % _HEAP_BYTES > 4096)


def _word(memory: io.FileIO, address: int) -> int:
    memory.seek(address)
    return int(struct.unpack("Q", memory.read(8))[0])
