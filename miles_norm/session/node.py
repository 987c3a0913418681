"""One turn of a session, and where a request belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from miles_norm.session.completion import Completion
from miles_norm.session.rendering import Message
from miles_norm.session.token_ids import TokenIds

__all__ = ["Attachment", "Node", "Tools"]

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where in the forest a request belongs."""

    parent: int | None
    """``seq`` of the turn that the request continues; None: it starts a tree."""
    suffix: tuple[Message, ...]
    """The messages of the request behind those of that turn."""
    tools: Tools | None = None
    """Of the request, as it came."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Node:
    """One turn, a request and the reply that the engine sampled for it: what they add to the turn before."""

    seq: int
    """Number in the order of commits; -1 for a turn that is not added yet."""
    parent: int | None
    """``seq`` of the turn that it continues."""
    suffix: tuple[Message, ...]
    """Messages of the request behind those of the parent; the reply is ``completion.message``."""
    tools: Tools | None
    new_prompt_token_ids: TokenIds
    """The prompt behind the tokens of the parent; the whole prompt where the turn starts a row."""
    completion: Completion
    """As the engine returned it, but of ``routed_experts`` only what lies beyond the tokens of the parent."""
    prompt_length: int
    """Tokens of the whole prompt."""
    context_length: int
    """Tokens of the whole prompt and the completion."""
    starts_row: bool
    """Whether its prompt does not begin with the tokens of the parent, so that a row begins with it."""
    committed_at: float
    """Seconds since the epoch, for people; order is ``seq``."""

    @property
    def truncated(self) -> bool:
        """Whether the turn ended by length."""
        return self.completion.finish_reason == "length"

    def messages(self) -> Iterator[Message]:
        """What the turn added to the conversation, the reply last."""
        yield from self.suffix
        yield self.completion.message

    def record(self) -> dict[str, Any]:
        """The turn as plain values and arrays, for ``TrajectoryForest.replay``: all that it adds to the session."""
        return {
            "seq": self.seq,
            "parent": self.parent,
            "suffix": list(self.suffix),
            "tools": None if self.tools is None else list(self.tools),
            "starts_row": self.starts_row,
            "new_prompt_token_ids": self.new_prompt_token_ids,
            "completion": {entry.name: getattr(self.completion, entry.name) for entry in fields(self.completion)},
            "committed_at": self.committed_at,
        }
