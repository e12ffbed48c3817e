"""Counts the sessions of each model at each Triton: Triton runs only so many sequences of a model at a time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic

from app.core.errors import ModelNotReady, TooManyRequests
from app.core.share import Share
from app.sessions.session_terms import SessionTerms

LONGEST_RETRY_S = 30
USUAL_RETRY_S = 5
"""``Retry-After`` while no sequence is known to end."""

PlaceKey = tuple[str, str, str]
"""A model, the address of a Triton and an API key. The key is empty for the places of all; the address for a pipeline
with ``max_open``; both names for all sessions of a key."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of one session in all of its models at the Triton at ``address``."""

    address: str
    keys: Sequence[PlaceKey]


@dataclass(frozen=True, slots=True)
class SessionOwner:
    """Who opens a session. ``key``: the id of the API key; empty without one.

    ``most``: limit of the key's sessions in all models; None: half of the places of each model.
    """

    key: str = ""
    most: int | None = None


ANYONE = SessionOwner()


class Places:
    """The places of this process. ``share``: its part of them."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._taken = Counter[PlaceKey]()
        self._free_at: dict[Place, float] = {}
        """When Triton forgets the sequences of ended sessions that it still has, in monotonic seconds."""

    def take(
        self, pipeline: str, terms: SessionTerms, homes: Sequence[str], servers: int, owner: SessionOwner = ANYONE
    ) -> Place:
        """Returns a place at the Triton with the most free ones. The caller must release it.

        ``homes``: the Tritons where the model may be called, of ``servers``.
        Raises TooManyRequests, or ModelNotReady without a Triton.
        """
        if not homes:
            raise ModelNotReady("No Triton has a ready model for a new session.", was_sent=False)

        def free_at(home: str) -> dict[PlaceKey, int]:
            limits: dict[PlaceKey, int] = {  # the slots are those of all Tritons together
                (model, home, ""): self._share.part(slots // servers) for model, slots in terms.slots.items()
            }
            if terms.max_open is not None:
                limits[f"pipeline {pipeline}", "", ""] = self._share.part(terms.max_open)
            if owner.key and owner.most is None:
                limits |= {(name, at, owner.key): max(each // 2, 1) for (name, at, _), each in limits.items()}
            elif owner.most is not None:
                limits["", "", owner.key] = max(self._share.part(owner.most), 1)
            return {each: limit - self._taken[each] for each, limit in limits.items()}

        address, free = max(((home, free_at(home)) for home in homes), key=lambda found: min(found[1].values()))
        if min(free.values()) <= 0:
            raise self._refusal(free)
        self._taken.update(list(free))
        return Place(address, list(free))

    def release(self, place: Place) -> None:
        self._free_at.pop(place, None)
        self._taken.subtract(place.keys)
        for key in place.keys:
            if not self._taken[key]:
                del self._taken[key]

    def hold(self, place: Place, until: float) -> None:
        """Notes when a place becomes free, in monotonic seconds. The caller must release it then."""
        self._free_at[place] = until

    def _refusal(self, free: Mapping[PlaceKey, int]) -> TooManyRequests:
        now, full = monotonic(), {each for each, count in free.items() if count <= 0}
        known = [until - now for place, until in self._free_at.items() if not full.isdisjoint(place.keys)]
        is_of_key = all(key for _, _, key in full)
        return TooManyRequests(
            f"As many sessions are open as {'this API key may' if is_of_key else 'the model can'} have.",
            hint="End sessions that are not needed any more with DELETE, or with X-Session-End on their last step"
            f"{', or let an operator raise `limits.sessions` of the key' if is_of_key else ''}.",
            retry_after_s=min(max(ceil(min(known)), 1), LONGEST_RETRY_S) if known else USUAL_RETRY_S,
        )
