"""The sessions of a server: turns go to the engine, into the journal, into their forest, in this order."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miles_norm.errors import NodeLimitError, SessionLimitError, UnknownSessionError
from miles_norm.session.engines.protocol import Engine, GenerationRequest
from miles_norm.session.node import Node
from miles_norm.session.prompt import next_prompt
from miles_norm.session.server.chat import ChatRequest
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.server.metrics import ServerMetrics
from miles_norm.session.store import Journal, JournalRecord
from miles_norm.session.token_log import TokenIds
from miles_norm.session.tree import TrajectoryForest
from miles_norm.session.wire import decode_node, encode_node

__all__ = ["LiveSession", "Sessions"]


@dataclass(eq=False, slots=True)
class LiveSession:
    """One session and who uses it."""

    session_id: str
    metadata: dict[str, Any]
    """As it was created with."""
    forest: TrajectoryForest
    created_at: float
    """Seconds since the epoch."""
    last_used: float = field(default_factory=time.monotonic)
    in_flight: int = 0
    """Requests that wait for the engine."""
    deleted: bool = False


class Sessions:
    """All sessions of a server.

    A turn waits for the engine without any lock, so requests of one session run side by side and become siblings. It is
    written to the journal before it enters its forest, so a turn that could not be written was never there.

    Args:
        engine: Samples the replies; started already.
        config: Limits and rules.
        journal: Where turns are kept; None: in memory alone.
    """

    def __init__(self, engine: Engine, config: ServerConfig, journal: Journal | None = None) -> None:
        self.engine, self.config = engine, config
        self._journal = journal
        self._sessions: dict[str, LiveSession] = {}
        self.metrics = ServerMetrics(lambda: len(self._sessions))
        for record in journal.replay() if journal is not None else ():
            self._replay(record)

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
        session = self._new(secrets.token_urlsafe(24), dict(metadata or {}), time.time())
        self._sessions[session.session_id] = session
        if self._journal is not None:
            created = json.dumps({"metadata": session.metadata, "created_at": session.created_at})
            try:
                await self._journal.append(session.session_id, "session", created.encode())
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

        Raises:
            UnknownSessionError: there is no such session, or it was deleted meanwhile.
            PathEndedError, NodeLimitError: the request cannot be attached.
            RenderingError: the chat template cannot render it.
            EngineError: the engine failed; the session stays as it was.
            JournalError: the turn could not be written; the session stays as it was.
        """
        began = time.perf_counter()
        session = self.get(session_id)
        attachment = session.forest.attach(request.messages, request.offered_tools)
        self._check_room(session)
        session.in_flight += 1
        try:
            prompt = next_prompt(session.forest, attachment, self.engine.renderer)
            asked = time.perf_counter()
            completion = await self.engine.generate(_generation(request, prompt.token_ids, session_id))
            self.metrics.engine_seconds.observe(time.perf_counter() - asked)
            if completion.response_id is None:
                completion = replace(completion, response_id=f"chatcmpl-{secrets.token_hex(16)}")
            turn = session.forest.prepare(attachment, prompt.token_ids, completion)
            # A client that leaves now must not leave a turn that is written and not there.
            node = await asyncio.shield(self._record(session, turn))
        finally:
            session.in_flight -= 1
            session.last_used = time.monotonic()
        self.metrics.turn_seconds.observe(time.perf_counter() - began)
        return node

    async def delete(self, session_id: str) -> None:
        """Forget a session; turns that still run are not recorded.

        Raises:
            UnknownSessionError: there is no such session.
            JournalError: it could not be removed from the journal.
        """
        await self._forget([self.get(session_id)])

    async def expire(self) -> int:
        """Forget the sessions that nobody has used for ``idle_seconds``; their number."""
        if self.config.idle_seconds is None:
            return 0
        limit = time.monotonic() - self.config.idle_seconds
        idle = [each for each in self._sessions.values() if each.last_used < limit and not each.in_flight]
        if idle:
            await self._forget(idle)
        return len(idle)

    async def _forget(self, sessions: list[LiveSession]) -> None:
        for session in sessions:
            session.deleted = True
            del self._sessions[session.session_id]
        if self._journal is not None:
            await self._journal.purge([session.session_id for session in sessions])

    async def _record(self, session: LiveSession, turn: Node) -> Node:
        if session.deleted:
            raise _unknown(session.session_id)
        if self._journal is not None:
            began = time.perf_counter()
            await self._journal.append(session.session_id, "turn", encode_node(session.forest, turn))
            self.metrics.journal_seconds.observe(time.perf_counter() - began)
        node = session.forest.add(turn)
        self.metrics.turns.labels(node.completion.finish_reason).inc()
        self.metrics.tokens.labels("prompt").inc(node.prompt_length)
        self.metrics.tokens.labels("completion").inc(len(node.completion.token_ids))
        if node.starts_row and node.parent is not None:
            self.metrics.mismatches.inc()
        return node

    def _check_room(self, session: LiveSession) -> None:
        """Turns that wait for the engine will be recorded, so they count."""
        taken = len(session.forest.nodes) + session.in_flight
        if taken >= self.config.max_nodes:
            raise NodeLimitError(
                f"session {session.session_id}",
                got=f"{len(session.forest.nodes)} turns, {session.in_flight} that wait for the engine, and one more",
                expected=f"at most max_nodes = {self.config.max_nodes}",
                reason="an agent that does not repeat the conversation as it was starts a tree with every request",
                remedy="send back replies unchanged, or raise max_nodes",
            )

    def _new(self, session_id: str, metadata: dict[str, Any], created_at: float) -> LiveSession:
        forest = TrajectoryForest(self.config.message_match, self.config.max_nodes)
        return LiveSession(session_id, metadata, forest, created_at)

    def _replay(self, record: JournalRecord) -> None:
        if record.kind == "session":
            created = json.loads(record.payload)
            session = self._new(record.session_id, created["metadata"], created["created_at"])
            self._sessions[record.session_id] = session
        else:
            forest = self._sessions[record.session_id].forest
            decode_node(forest, record.payload)


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
