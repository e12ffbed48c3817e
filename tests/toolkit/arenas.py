"""Locks the arenas of glibc's malloc in another process, as a thread does that is interrupted inside malloc."""

import struct
from pathlib import Path

_HEAP_BYTES = 64 * 2**20
"""Heaps of arenas begin at multiples of this address. Source: HEAP_MAX_SIZE in glibc's arena.c, on 64-bit machines."""
_NEXT = 2160
"""Offset of ``next`` in ``malloc_state``, which begins with the lock. Source: malloc.c of glibc 2.26 and newer."""


def lock_arenas(pid: int, count: int | None = None) -> int:
    """Locks ``count`` arenas of the process, the main one last; None: all. Returns how many were locked."""
    starts = (
        int(line.partition("-")[0], 16)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if " rw-p 00000000 00:00 0" in line
    )
    heap = next(start for start in starts if start % _HEAP_BYTES == 0)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:

        def word(address: int) -> int:
            memory.seek(address)
            return int(struct.unpack("Q", memory.read(8))[0])

        arenas = [word(heap)]  # a circular list, from the arena of the heap
        while (arena := word(arenas[-1] + _NEXT)) != arenas[0]:
            arenas.append(arena)
        locked = sorted(arenas, key=lambda arena: arena % _HEAP_BYTES > 4096)[
            :count
        ]  # the main arena is in libc itself
        for arena in locked:
            memory.seek(arena)
            memory.write(struct.pack("i", 1))
    return len(locked)
