"""The sessions of a server: turns go to the engine, into the journal, into their forest, in this order."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_norm.errors import (
    EngineContractError,
    JournalError,
    SessionError,
    SessionLimitError,
    UnknownSessionError,
)
from miles_norm.session.engines.protocol import Engine, GenerationRequest
from miles_norm.session.node import Attachment, Node
from miles_norm.session.prompt import next_prompt
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.server.live_session import (
    LiveSession,
    new_session,
    restored_sessions,
    session_record,
    turn_record,
)
from miles_norm.session.server.metrics import ServerMetrics
from miles_norm.session.server.requests import ChatRequest
from miles_norm.session.store import Journal
from miles_norm.session.token_ids import TokenIds

__all__ = ["Sessions"]


class Sessions:
    """All sessions of a server.

    A turn waits for the engine without any lock, so requests of one session run side by side and become siblings. It is
    written to the journal before it enters its forest, so a turn that could not be written was never there.

    Args:
        engine: Samples the replies; started already.
        config: Limits and rules.
        journal: Where turns are kept; None: in memory alone.

    Raises:
        JournalError: the journal cannot be read, or holds what is no record of a session.
    """

    def __init__(self, engine: Engine, config: ServerConfig, journal: Journal | None = None) -> None:
        self.engine, self.config = engine, config
        self._journal = journal
        self._sessions: dict[str, LiveSession] = {}
        self._recordings: set[asyncio.Task[Node]] = set()
        self.metrics = ServerMetrics(lambda: len(self._sessions))
        if journal is not None:
            self._sessions = restored_sessions(journal, config)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    async def create(self, metadata: Mapping[str, Any] | None = None) -> LiveSession:
        """A new session, its id beyond guessing.

        Raises:
            SessionLimitError: there are ``max_sessions``.
            JournalError: it could not be written.
        """
        if len(self._sessions) >= self.config.max_sessions:
            raise SessionLimitError(
                "sessions",
                got=f"{len(self._sessions)} and one more",
                expected=f"at most max_sessions = {self.config.max_sessions}",
                reason="each keeps its tokens in memory",
                remedy="delete the sessions whose rows were taken, set idle_seconds, or raise max_sessions",
            )
        session_id = secrets.token_urlsafe(24)
        session = new_session(session_id, dict(metadata or {}), time.time(), self.config)
        self._sessions[session.session_id] = session
        if self._journal is not None:
            try:
                await self._journal.append(*session_record(session))
            except BaseException:
                del self._sessions[session.session_id]
                raise
        return session

    def get(self, session_id: str) -> LiveSession:
        """The session of that id.

        Raises:
            UnknownSessionError: there is none.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise _unknown(session_id)
        session.last_used = time.monotonic()
        return session

    async def complete(self, session_id: str, request: ChatRequest) -> Node:
        """One turn: attach, sample, record.

        Cancelled while the engine samples, it leaves nothing behind; later the turn is recorded all the same.

        Raises:
            UnknownSessionError: there is no such session, or it was deleted meanwhile.
            PathEndedError, NodeLimitError: the request cannot be attached.
            RenderingError: the chat template cannot render it.
            EngineError: the engine failed; the session stays as it was.
            JournalError: the turn could not be written; the session stays as it was.
        """
        began = time.perf_counter()
        session = self.get(session_id)
        # Turns that are under way will be recorded, so they count.
        forest, under_way = session.forest, session.in_flight
        attachment = forest.attach(request.messages, request.offered_tools, under_way=under_way)
        session.in_flight += 1
        try:
            turn = await self._sample(session, attachment, request)
        except BaseException:
            session.released()
            raise
        recording = asyncio.create_task(self._record(session, turn))
        self._recordings.add(recording)
        recording.add_done_callback(self._recordings.discard)
        # A turn that is being written must be in the forest too, even if its client leaves now.
        node = await asyncio.shield(recording)
        self.metrics.turn_seconds.observe(time.perf_counter() - began)
        return node

    async def delete(self, session_id: str) -> None:
        """Forget a session; turns that still run are not recorded.

        Raises:
            UnknownSessionError: there is no such session.
            JournalError: it could not be removed from the journal; it stays.
        """
        await self._forget([self.get(session_id)])

    async def expire(self) -> int:
        """Forget the sessions that nobody has used for ``idle_seconds``; their number.

        Raises:
            JournalError: they could not be removed from the journal; they stay.
        """
        if self.config.idle_seconds is None:
            return 0
        limit = time.monotonic() - self.config.idle_seconds
        idle = [each for each in self._sessions.values() if each.last_used < limit and not each.in_flight]
        if idle:
            await self._forget(idle)
        return len(idle)

    async def close(self) -> None:
        """Wait for turns that are being recorded."""
        if self._recordings:
            await asyncio.wait(self._recordings)

    async def _forget(self, sessions: list[LiveSession]) -> None:
        for session in sessions:
            session.deleted = True
            del self._sessions[session.session_id]
        if self._journal is None:
            return
        try:
            await self._journal.purge([session.session_id for session in sessions])
        except JournalError:
            # The journal holds them still, and would bring them back with the next start.
            for session in sessions:
                session.deleted = False
                self._sessions[session.session_id] = session
            raise

    async def _sample(self, session: LiveSession, attachment: Attachment, request: ChatRequest) -> Node:
        """The turn that the engine makes of a request, not recorded yet."""
        prompt = next_prompt(session.forest, attachment, self.engine.renderer)
        asked = time.perf_counter()
        completion = await self.engine.generate(_generation(request, prompt.token_ids, session.session_id))
        self.metrics.engine_seconds.observe(time.perf_counter() - asked)
        if completion.response_id is None:
            completion = replace(completion, response_id=f"chatcmpl-{secrets.token_hex(16)}")
        try:
            return session.forest.prepare(attachment, prompt.token_ids, completion)
        except SessionError as error:
            # The request fits its place, so it is the answer that does not.
            raise EngineContractError(
                error.subject, got=error.got, expected=error.expected, reason=error.reason, remedy=error.remedy
            ) from error

    async def _record(self, session: LiveSession, turn: Node) -> Node:
        try:
            if session.deleted:
                raise _unknown(session.session_id)
            if self._journal is not None:
                began = time.perf_counter()
                # Nothing is awaited between the check above and the journal's queue, so no record follows a purge.
                await self._journal.append(*turn_record(session, turn))
                self.metrics.journal_seconds.observe(time.perf_counter() - began)
            node = session.forest.add(turn)
        finally:
            session.released()
        self.metrics.recorded(node)
        return node


def _generation(request: ChatRequest, token_ids: TokenIds, session_id: str) -> GenerationRequest:
    return GenerationRequest(
        token_ids=token_ids,
        messages=request.messages,
        tools=request.offered_tools,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        max_tokens=request.limit,
        stop=request.stop_texts,
        seed=request.seed,
        extra=request.engine_fields,
        routing_key=session_id,
    )


def _unknown(session_id: str) -> UnknownSessionError:
    return UnknownSessionError(
        f"session {session_id[:80]!r}",
        got="no session of this id",
        expected="the id of a session that was created here and is neither deleted nor expired",
        reason="turns belong to a session",
        remedy="create one with POST /sessions, and use its id",
    )
