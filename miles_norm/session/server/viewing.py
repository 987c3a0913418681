"""What the page of a running server shows: the latest sessions as trees, and which row speaks for each rollout.

Whatever the number of sessions, what is sent is bounded; session ids, which are the key to a session, are not in it.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_norm.errors import shown
from miles_norm.samples import Sample
from miles_norm.session.node import Node
from miles_norm.session.rendering import Message
from miles_norm.session.server.live_session import LiveSession
from miles_norm.session.server.requests import SamplesRequest
from miles_norm.session.server.sessions import Sessions

__all__ = ["Viewer"]

LATEST = 50
"""Sessions that are shown, and collected ones that are remembered."""
MOST_TURNS, MOST_MESSAGES, MOST_CHARACTERS = 400, 6, 400
"""Of one session, of what one request added, of one message."""
_FRESH_SECONDS = 0.5
"""How long an overview is good for: many pages cost no more than one."""


@dataclass(frozen=True, eq=False)
class _Collected:
    """A session whose rows were taken, and what they are."""

    session: LiveSession
    asked: dict[str, Any]
    rows: list[dict[str, Any]]
    at: float


class Viewer:
    """What there is to see of the sessions of a server."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._collected: deque[_Collected] = deque(maxlen=LATEST)
        self._overview: tuple[float, dict[str, Any]] | None = None

    def collected(self, session: LiveSession, asked: SamplesRequest, rows: Sequence[Sample]) -> None:
        """Remember the rows of a session; those of the latest ones stay when their sessions are deleted."""
        ids = {name: getattr(asked, name) for name in ("group_index", "index", "rollout_id")}
        # Who asks again means the same rollout.
        others = [one for one in self._collected if one.session is not session]
        self._collected = deque([*others, _Collected(session, ids, _rows(rows), time.time())], LATEST)

    def overview(self) -> dict[str, Any]:
        """Counts over all sessions, and the latest ones in brief."""
        now = time.monotonic()
        if self._overview is None or now - self._overview[0] > _FRESH_SECONDS:
            self._overview = now, self._summed_up()
        return self._overview[1]

    def session(self, number: int) -> dict[str, Any] | None:
        """One session as a tree of turns; None if it is gone."""
        collected = next((one for one in self._collected if one.session.number == number), None)
        if collected is not None:
            return _brief(collected.session) | _tree(collected.session, collected.rows)
        session = next((one for one in self._sessions if one.number == number), None)
        return None if session is None else _brief(session) | _tree(session, None)

    def _summed_up(self) -> dict[str, Any]:
        taken = {one.session.number for one in self._collected}
        running = [session for session in self._sessions if session.number not in taken]
        latest = heapq.nlargest(LATEST, running, key=lambda session: session.last_used)
        return {
            "sessions": len(self._sessions),
            "in_flight": sum(session.in_flight for session in running),
            "turns": sum(len(session.forest.nodes) for session in running),
            "not_collected": len(running),
            "running": [_brief(session) for session in sorted(latest, key=lambda one: -one.number)],
            "collected": [
                _brief(one.session) | {"asked": one.asked, "at": one.at} | _spoken(one.rows)
                for one in reversed(self._collected)
            ],
        }


def _brief(session: LiveSession) -> dict[str, Any]:
    return {
        "number": session.number,
        "metadata": shown(session.metadata, 200) if session.metadata else "",
        "created_at": session.created_at,
        "turns": len(session.forest.nodes),
        "in_flight": session.in_flight,
    }


def _rows(rows: Sequence[Sample]) -> list[dict[str, Any]]:
    """Rows of one rollout; the first one with the most trainable tokens speaks for it."""
    trainable = [int(np.sum(np.asarray(row.loss_mask))) for row in rows]
    speaker = trainable.index(max(trainable)) if rows else None
    return [
        {
            "node_id": row.metadata["leaf"]["path_node_ids"][-1],
            "tokens": len(row.tokens),
            "response": row.response_length,
            "trainable": tokens,
            "reward": row.reward if isinstance(row.reward, int | float) or row.reward is None else shown(row.reward),
            "status": row.status,
            "speaks": place == speaker,
        }
        for place, (row, tokens) in enumerate(zip(rows, trainable, strict=True))
    ]


def _spoken(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rows there are, and which speaks."""
    place = next((place for place, row in enumerate(rows) if row["speaks"]), None)
    return {"num_rows": len(rows), "speaker": None if place is None else {"place": place, **rows[place]}}


def _tree(session: LiveSession, rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    forest = session.forest
    nodes = [_turn(node) for node in forest.nodes[-MOST_TURNS:]]
    described = None if rows is None else rows[:MOST_TURNS]
    leaves = [{"node_id": row["node_id"], "row": place} for place, row in enumerate(described or ())]
    with_row = {row["node_id"] for row in rows or ()}
    latest = forest.leaves()[-MOST_TURNS:]
    leaves += [{"node_id": leaf.seq, "row": None} for leaf in latest if leaf.seq not in with_row]
    return {"rows": described, "tree": {"nodes": nodes, "leaves": leaves}}


def _turn(node: Node) -> dict[str, Any]:
    return {
        "id": node.seq,
        "parent": node.parent,
        "finish_reason": node.completion.finish_reason,
        "prompt_tokens": node.prompt_length,
        "completion_tokens": len(node.completion.token_ids),
        "weight_version": node.completion.weight_version,
        "left_out": max(len(node.suffix) - MOST_MESSAGES, 0),
        "messages": [_message(message) for message in (*node.suffix[-MOST_MESSAGES:], node.completion.message)],
    }


def _message(message: Message) -> dict[str, str]:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json(content)
    if calls := message.get("tool_calls"):
        text = f"{text}\n{_json(calls)}".strip()
    cut = f"{text[:MOST_CHARACTERS]} … {len(text)} characters" if len(text) > MOST_CHARACTERS else text
    return {"role": str(message.get("role")), "text": cut}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=shown)
