"""One turn of a session, and where a request belongs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from miles_norm.errors import SessionError, shown
from miles_norm.session.completion import Completion, FinishReason
from miles_norm.session.rendering import Message
from miles_norm.session.token_ids import TokenIds, as_token_ids

__all__ = ["Attachment", "Node", "Tools", "checked_completion"]

Tools = Sequence[Mapping[str, Any]]
_FINISH_REASONS = get_args(FinishReason)


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


def checked_completion(completion: Completion, expert_rows: int) -> Completion:
    """A copy of a completion, with arrays of its dtypes.

    Raises:
        SessionError: a length that does not fit, or an unknown finish reason.
    """
    ids = as_token_ids(completion.token_ids, "completion.token_ids").copy()
    log_probs = np.array(completion.log_probs, np.float32)
    experts = completion.routed_experts
    got = ""
    if log_probs.shape != ids.shape:
        got = f"{len(ids)} token ids and log_probs of shape {list(log_probs.shape)}"
    elif experts is not None and (experts.ndim != 3 or len(experts) != expert_rows):
        got = f"routed_experts of shape {list(experts.shape)}, where {expert_rows} tokens have been routed"
    elif completion.finish_reason not in _FINISH_REASONS:
        got = f"finish_reason {shown(completion.finish_reason)}"
    if got:
        raise SessionError(
            "completion",
            got=got,
            expected="one log-prob per sampled token, routed experts [context - 1, layers, top-k] or none, and one of "
            f"the finish reasons {', '.join(_FINISH_REASONS)}",
            reason="the row is trained on exactly what was sampled",
            remedy="return tokens, log-probs and experts of the same request from the engine",
        )
    return replace(completion, message=copy.deepcopy(completion.message), token_ids=ids, log_probs=log_probs)
