"""One session of a server, and how a journal holds it."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

from miles_norm.errors import JournalError, shown
from miles_norm.session.node import Node
from miles_norm.session.server.config import ServerConfig
from miles_norm.session.store import Journal
from miles_norm.session.tree import TrajectoryForest
from miles_norm.session.wire import decode_node, encode_node

__all__ = ["LiveSession", "new_session", "restored_sessions", "session_record", "turn_record"]

logger = logging.getLogger("miles_norm")

Record = tuple[str, str, bytes]
"""What a journal appends: session id, kind and payload."""


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
    """Turns that are being sampled or recorded."""
    deleted: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    """What a page calls it: its id is the key to it."""

    def released(self) -> None:
        """One turn is no longer under way."""
        self.in_flight -= 1
        self.last_used = time.monotonic()


def new_session(session_id: str, metadata: dict[str, Any], created_at: float, config: ServerConfig) -> LiveSession:
    """A session without turns."""
    forest = TrajectoryForest(config.message_match, max_nodes=config.max_nodes)
    return LiveSession(session_id, metadata, forest, created_at)


def session_record(session: LiveSession) -> Record:
    """What is written when a session is made."""
    created = {"metadata": session.metadata, "created_at": session.created_at}
    return session.session_id, "session", json.dumps(created).encode()


def turn_record(session: LiveSession, turn: Node) -> Record:
    """What is written before a turn is answered."""
    return session.session_id, "turn", encode_node(turn)


def restored_sessions(journal: Journal, config: ServerConfig) -> dict[str, LiveSession]:
    """The sessions that a journal holds, with every turn.

    Raises:
        JournalError: it cannot be read, or holds what is no record of a session.
    """
    sessions: dict[str, LiveSession] = {}
    for position, record in enumerate(journal.replay()):
        try:
            if record.kind == "session":
                if record.session_id in sessions:
                    raise ValueError("it is there already")
                metadata, created_at = _created(record.payload)
                sessions[record.session_id] = new_session(record.session_id, metadata, created_at, config)
            elif record.kind == "turn":
                decode_node(sessions[record.session_id].forest, record.payload)
            else:
                raise ValueError("a kind of record that is unknown")
        except Exception as error:
            # Whatever it is that a record cannot become, it is named; MemoryError aside, all of it lies in the record.
            raise JournalError(
                f"record {position} of the journal",
                got=f"{shown(record.kind)} of session {record.session_id!r}: {type(error).__name__}: {error}",
                expected="sessions, and turns of the sessions before them",
                reason="every acknowledged turn has to be there again",
                remedy="restore the file from a copy, or move it away and start anew",
            ) from error
    if sessions:
        turns = sum(len(session.forest.nodes) for session in sessions.values())
        logger.info("restored %d sessions with %d turns from %s", len(sessions), turns, journal.path)
    return sessions


def _created(payload: bytes) -> tuple[dict[str, Any], float]:
    created = json.loads(payload)
    metadata, created_at = created["metadata"], created["created_at"]
    timed = isinstance(created_at, int | float) and not isinstance(created_at, bool) and math.isfinite(created_at)
    if not (isinstance(metadata, dict) and timed):
        raise ValueError(f"metadata {shown(metadata)}, created_at {shown(created_at)}")
    return metadata, float(created_at)
