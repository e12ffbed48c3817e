"""The sessions of this process: opens them, finds them by their id, and frees their places in Triton."""

import asyncio
import secrets
from collections.abc import Callable
from time import monotonic
from typing import Generic, Protocol

from msgspec.structs import replace

from app.core.aio import BackgroundTasks
from app.core.engine import InferenceServer, discard_stream
from app.core.errors import GatewayError, UnknownSession
from app.core.inference import Deadline, InferenceRequest, new_request_id
from app.core.sequence import SequenceIdSource, in_sequence
from app.core.session import SessionTerms
from app.core.share import Share
from app.sessions.places import Places, SessionOwner
from app.sessions.session import AnswerMemory, End, PipelineSession, Subject

ID_BYTES = 16
"""A session id is a bearer capability: whoever has it can run steps."""
KEEP_S = 60.0
"""How long an ended session is known: to repeat its last answer, and to tell that it was lost."""
MOST_PAST = 10_000
SLACK_S = 1.0
"""How much later than its idle time Triton may forget a sequence."""


class SessionObserver(Protocol[Subject]):
    def opened(self, session: PipelineSession[Subject]) -> None: ...

    def ended(self, session: PipelineSession[Subject], reason: End) -> None:
        """The session takes no further steps. Its last step may still run."""

    def left(self, session: PipelineSession[Subject]) -> None:
        """The gateway does nothing more for the session."""


class Sessions(Generic[Subject]):
    """``ending_of``: a request that ends a session's sequence in Triton; None if the pipeline declares none."""

    def __init__(
        self,
        engine: InferenceServer,
        share: Share,
        observer: SessionObserver[Subject],
        ending_of: Callable[[PipelineSession[Subject]], InferenceRequest | None],
    ) -> None:
        self._engine = engine
        self._places = Places(share)
        self._ids = SequenceIdSource(share)
        self._observer = observer
        self._ending_of = ending_of
        self._memory = AnswerMemory()
        self._open: dict[str, PipelineSession[Subject]] = {}
        self._past: dict[str, PipelineSession[Subject]] = {}
        """Those that ended a short time ago, in this order."""
        self._used_ids = set[int | str]()
        self._leaving = BackgroundTasks()

    def open(
        self, pipeline: str, model: tuple[str, str], terms: SessionTerms, owner: SessionOwner, subject: Subject
    ) -> PipelineSession[Subject]:
        """``model``: name and version.

        Raises TooManyRequests or ModelNotReady.
        """
        servers = len(self._engine.states()) or 1
        place = self._places.take(pipeline, terms, self._engine.homes(*model), servers, owner)
        session = PipelineSession(
            id=secrets.token_urlsafe(ID_BYTES),
            pipeline=pipeline,
            owner=owner.key,
            terms=terms,
            sequence_id=self._new_sequence_id(terms),
            place=place,
            subject=subject,
            on_end=self._ended,
            memory=self._memory,
        )
        self._open[session.id] = session
        self._observer.opened(session)
        return session

    def find(self, session_id: str) -> PipelineSession[Subject]:
        """Returns also a session that ended a short time ago. Raises UnknownSession."""
        session = self._open.get(session_id) or self._past.get(session_id)
        if session is None:
            raise UnknownSession("This process has no such session, or it has ended.")
        return session

    def _new_sequence_id(self, terms: SessionTerms) -> int | str:
        while (sequence_id := self._ids.new_id(terms.ids)) in self._used_ids:
            pass
        self._used_ids.add(sequence_id)
        return sequence_id

    def _ended(self, session: PipelineSession[Subject], reason: End) -> None:
        self._past[session.id] = self._open.pop(session.id)
        self._observer.ended(session, reason)
        self._leaving.start(self._leave(session))
        asyncio.get_running_loop().call_later(KEEP_S, self._forget, session.id)
        if len(self._past) > MOST_PAST:
            self._forget(next(iter(self._past)))

    async def _leave(self, session: PipelineSession[Subject]) -> None:
        """Ends the sequence in Triton if that is possible, and frees its place when Triton has forgotten it."""
        await session.settle()
        until = await self._forgotten_at(session)
        self._observer.left(session)
        if until is None:
            self._free(session)
        else:
            self._places.hold(session.place, until)
            asyncio.get_running_loop().call_later(until - monotonic(), self._free, session)

    async def _forgotten_at(self, session: PipelineSession[Subject]) -> float | None:
        """When Triton forgets the sequence, in monotonic seconds; None if it has no such sequence any more."""
        if session.queued_at is None or session.has_end_flag or session.sequence.is_forgotten:
            return None
        ending = None if session.sequence.is_lost else self._ending_of(session)
        if ending is not None and await self._end_in_triton(session, ending):
            return None
        return session.queued_at + session.terms.longest_idle_s + SLACK_S

    async def _end_in_triton(self, session: PipelineSession[Subject], ending: InferenceRequest) -> bool:
        """Whether Triton ended the sequence."""
        request = replace(
            in_sequence(ending, session.sequence_id, ends=True, sequence=session.sequence), request_id=new_request_id()
        )
        try:
            await discard_stream(self._engine, request, Deadline.after(session.terms.triton_idle_s))
        except GatewayError:
            return session.sequence.is_forgotten
        return True

    def _free(self, session: PipelineSession[Subject]) -> None:
        self._places.release(session.place)
        self._used_ids.discard(session.sequence_id)

    def _forget(self, session_id: str) -> None:
        """``session_id``: the session itself would stay in memory until its timer fires, beyond MOST_PAST."""
        session = self._past.pop(session_id, None)
        if session is not None:
            session.forget()
