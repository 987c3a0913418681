"""The turns of one session as trees: a request continues the deepest turn that it repeats, or starts a tree of its own.

Nothing is ever changed or removed, so any number of requests may be under way: what they become is decided when they
are committed.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import NodeLimitError, PathEndedError, SessionError, shown
from miles_norm.session.completion import Completion, FinishReason
from miles_norm.session.messages import MatchRule, message_matcher
from miles_norm.session.rendering import Message
from miles_norm.session.token_log import TokenIds, TokenLog, as_token_ids

__all__ = ["Attachment", "Node", "Tools", "TrajectoryForest"]

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
    """One turn: a request and the reply that the engine sampled for it."""

    seq: int
    """Number in the order of commits."""
    parent: int | None
    """``seq`` of the turn that it continues."""
    suffix: tuple[Message, ...]
    """Messages of the request behind those of the parent; the reply is ``completion.message``."""
    tools: Tools | None
    completion: Completion
    """As the engine returned it, but of ``routed_experts`` only what lies beyond the context of the parent."""
    prompt_length: int
    starts_row: bool
    """Whether its prompt is not a continuation of the parent's tokens, so that a row begins with it."""
    committed_at: float
    """Seconds since the epoch, for people; order is ``seq``."""
    log: TokenLog = field(repr=False)

    @property
    def context_length(self) -> int:
        """Number of tokens of prompt and completion."""
        return self.prompt_length + len(self.completion.token_ids)

    @property
    def prompt_token_ids(self) -> TokenIds:
        """The prompt as it was sent, ``[prompt_length]``."""
        return self.log.ids(self.prompt_length)

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and completion, ``[context_length]``."""
        return self.log.ids(self.context_length)

    @property
    def truncated(self) -> bool:
        """Whether the turn ended by length."""
        return self.completion.finish_reason == "length"


class TrajectoryForest:
    """An append-only forest of turns.

    Args:
        match: When a message counts as the one that is held: ``strict``, ``loose``, or a function of both.
        max_nodes: Turns that the session may have. Far more turns than an agent takes mean that it does not repeat the
            conversation as it was, so that every request starts a tree.

    >>> forest = TrajectoryForest()
    >>> question = {"role": "user", "content": "2 + 2?"}
    >>> reply = Completion({"role": "assistant", "content": "4"}, np.array([19, 2]), np.array([-0.1, -0.2]), "stop")
    >>> forest.commit(forest.attach([question]), [1, 50, 51], reply).seq
    0
    >>> forest.attach([question, reply.message, {"role": "user", "content": "Sure?"}])
    Attachment(parent=0, suffix=({'role': 'user', 'content': 'Sure?'},), tools=None)
    """

    def __init__(self, match: MatchRule = "strict", max_nodes: int = 16_384) -> None:
        self._matches = message_matcher(match)
        self.max_nodes = max_nodes
        self.nodes: list[Node] = []
        """Every turn, in the order of commits."""
        self._children: defaultdict[int | None, list[int]] = defaultdict(list)

    def attach(self, messages: Sequence[Message], tools: Tools | None = None) -> Attachment:
        """Find the deepest turn whose messages, reply included, begin the request.

        Of several equally deep ones the latest is taken. Nothing is locked or reserved: two requests that attach to one
        turn become siblings.

        Raises:
            PathEndedError: that turn ended by length.
            NodeLimitError: the session has as many turns as it may have.
        """
        self._check_limit()
        node, matched = self._deepest(messages)
        if node is not None:
            _check_extensible(node)
        return Attachment(None if node is None else node.seq, tuple(messages[matched:]), tools)

    def commit(
        self,
        attachment: Attachment,
        prompt_token_ids: Sequence[int] | NDArray[Any],
        completion: Completion,
        *,
        committed_at: float | None = None,
    ) -> Node:
        """Add a turn: ``prepare`` and ``add`` in one."""
        return self.add(self.prepare(attachment, prompt_token_ids, completion, committed_at=committed_at))

    def prepare(
        self,
        attachment: Attachment,
        prompt_token_ids: Sequence[int] | NDArray[Any],
        completion: Completion,
        *,
        committed_at: float | None = None,
    ) -> Node:
        """A turn that is not in the forest yet, so that it can be written down before it is; its ``seq`` is -1.

        Whether it continues its parent's row is read off the tokens: it does if the prompt begins with the prompt and
        the completion of the parent, and else starts a row. Messages are copied.

        Args:
            attachment: Of ``attach``.
            prompt_token_ids: The whole prompt as the engine read it.
            completion: What the engine returned.
            committed_at: Seconds since the epoch; now by default.

        Raises:
            SessionError: tokens, log-probs or routed experts that do not fit each other.
            PathEndedError: as for ``attach``.
        """
        parent = None if attachment.parent is None else self.nodes[attachment.parent]
        if parent is not None:
            _check_extensible(parent)
        prompt = as_token_ids(prompt_token_ids, "prompt_token_ids")
        completion = _checked(completion, len(prompt))
        held = 0 if parent is None else parent.context_length
        extends = parent is not None and np.array_equal(prompt[:held], parent.token_ids)
        new = np.concatenate([prompt[held:] if extends else prompt, completion.token_ids])
        if completion.routed_experts is not None:
            known = max(held - 1, 0) if extends else 0
            completion = replace(completion, routed_experts=completion.routed_experts[known:].copy())
        return Node(
            seq=-1,
            parent=attachment.parent,
            suffix=copy.deepcopy(attachment.suffix),
            tools=copy.deepcopy(attachment.tools),
            completion=completion,
            prompt_length=len(prompt),
            starts_row=not extends,
            committed_at=time.time() if committed_at is None else committed_at,
            log=parent.log.extended(held, new) if parent is not None and extends else TokenLog(new),
        )

    def add(self, turn: Node) -> Node:
        """Add a turn that ``prepare`` of this forest made; it gets the next ``seq``.

        Raises:
            NodeLimitError: as for ``attach``.
        """
        self._check_limit()
        node = replace(turn, seq=len(self.nodes))
        self.nodes.append(node)
        self._children[node.parent].append(node.seq)
        return node

    def children(self, seq: int | None) -> list[int]:
        """The turns that continue a turn; those that start a tree for None."""
        return list(self._children.get(seq, ()))

    def leaves(self) -> list[Node]:
        """Turns that none continues, in the order of commits."""
        return [node for node in self.nodes if not self._children.get(node.seq)]

    def path(self, seq: int) -> list[Node]:
        """The turns from the start of the tree to this one."""
        nodes = []
        step: int | None = seq
        while step is not None:
            nodes.append(self.nodes[step])
            step = nodes[-1].parent
        return nodes[::-1]

    def messages(self, seq: int) -> list[Message]:
        """The conversation up to the reply of a turn."""
        return [message for node in self.path(seq) for message in _messages(node)]

    @property
    def mismatches(self) -> int:
        """Turns that continue another one whose tokens they do not continue."""
        return sum(node.starts_row and node.parent is not None for node in self.nodes)

    def _deepest(self, messages: Sequence[Message]) -> tuple[Node | None, int]:
        """The node to attach to, and how many messages it covers."""
        best, best_matched = None, 0
        open_nodes = [(seq, 0) for seq in self._children.get(None, ())]
        while open_nodes:
            seq, offset = open_nodes.pop()
            node = self.nodes[seq]
            matched = offset + len(node.suffix) + 1
            if matched > len(messages) or not all(map(self._matches, _messages(node), messages[offset:matched])):
                continue
            if matched > best_matched or (best is not None and matched == best_matched and seq > best.seq):
                best, best_matched = node, matched
            open_nodes.extend((child, matched) for child in self._children.get(seq, ()))
        return best, best_matched

    def _check_limit(self) -> None:
        if len(self.nodes) >= self.max_nodes:
            raise NodeLimitError(
                "session",
                got=f"{len(self.nodes)} turns and one more, {len(self._children.get(None, ()))} of which start a tree",
                expected=f"at most max_nodes = {self.max_nodes}",
                reason="an agent that does not repeat the conversation as it was starts a tree with every request",
                remedy="send back replies unchanged or match them loosely; or raise max_nodes",
            )


def _messages(node: Node) -> Iterator[Message]:
    yield from node.suffix
    yield node.completion.message


def _check_extensible(node: Node) -> None:
    if node.truncated:
        raise PathEndedError(
            f"turn {node.seq}",
            got="a request that continues it, and it ended by length",
            expected="a request that continues a turn which the model ended",
            reason="the model never wrote what would come before the new messages",
            remedy="repeat the turn with more room, or end the conversation",
        )


def _checked(completion: Completion, prompt_length: int) -> Completion:
    """The completion with arrays of its dtypes.

    Raises:
        SessionError: a length that does not fit, or an unknown finish reason.
    """
    ids = as_token_ids(completion.token_ids, "completion.token_ids").copy()
    log_probs = np.array(completion.log_probs, np.float32)
    experts = completion.routed_experts
    context = prompt_length + len(ids)
    got = ""
    if log_probs.shape != ids.shape:
        got = f"{len(ids)} token ids and log_probs of shape {list(log_probs.shape)}"
    elif experts is not None and (experts.ndim != 3 or len(experts) != max(context - 1, 0)):
        got = f"a context of {context} tokens and routed_experts of shape {list(experts.shape)}"
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
    message = copy.deepcopy(completion.message)
    return replace(completion, message=message, token_ids=ids, log_probs=log_probs)
