"""Tracks all regions and their states; no I/O."""

import math
import time
from collections.abc import Iterable

from app.triton.shared_memory.region import Region


class Pool:
    """Every region counts against ``limit`` from :meth:`add` to :meth:`drop`.

    A region is in use by one call, free, or retired. A retired region is never used again, because Triton may still
    read or write it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free: list[Region] = []
        self._used: set[Region] = set()
        self._retired: set[Region] = set()

    @property
    def free_bytes(self) -> int:
        return _bytes_of(self._free)

    @property
    def used_bytes(self) -> int:
        return _bytes_of(self._used)

    @property
    def retired_bytes(self) -> int:
        return _bytes_of(self._retired)

    @property
    def retired(self) -> list[Region]:
        return list(self._retired)

    @property
    def names(self) -> set[str]:
        """The names of the regions that are free or in use."""
        return {region.name for region in (*self._free, *self._used)}

    def has_room(self, size: int) -> bool:
        return self.free_bytes + self.used_bytes + self.retired_bytes + size <= self._limit

    def add(self, region: Region) -> None:
        """Adds a new region, in use by a call."""
        self._used.add(region)

    def take(self, size: int, most: float = math.inf) -> Region | None:
        """Takes the smallest free region that is large enough and has at most ``most`` bytes."""
        fitting = [region for region in self._free if size <= region.size <= most]
        if not fitting:
            return None
        region = min(fitting, key=lambda region: region.size)
        self._free.remove(region)
        self._used.add(region)
        return region

    def give_back(self, region: Region) -> None:
        """Frees a region after Triton has answered the call. A no-op for a region that was retired in the meantime."""
        if region in self._used:
            self._used.remove(region)
            region.used_at = time.monotonic()
            self._free.append(region)

    def retire(self, region: Region) -> None:
        self._used.discard(region)
        self._retired.add(region)

    def retire_free(self, since: float) -> None:
        """Retires the free regions that no call has used since then."""
        kept = [region for region in self._free if region.used_at > since]
        self._retired.update(set(self._free).difference(kept))
        self._free = kept

    def retire_all(self) -> None:
        self._retired |= self._used | set(self._free)
        self._used.clear()
        self._free.clear()

    def drop(self, region: Region) -> None:
        """Removes a region that Triton can no longer access, or that no call ever used."""
        self._used.discard(region)
        self._retired.discard(region)


def _bytes_of(regions: Iterable[Region]) -> int:
    return sum(region.size for region in regions)
