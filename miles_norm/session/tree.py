"""The turns of one session as trees: a request continues the deepest turn that it repeats, or starts a tree of its own.

Nothing is ever changed or removed, so any number of requests may be under way: what they become is decided when they
are committed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import NodeLimitError, SessionError, shown
from miles_norm.session.completion import Completion
from miles_norm.session.messages import MatchRule, message_matcher
from miles_norm.session.node import Attachment, Node, Tools
from miles_norm.session.rendering import Message
from miles_norm.session.token_ids import TokenIds, as_token_ids
from miles_norm.session.turn_checks import (
    check_attachment,
    check_committed_at,
    check_count,
    check_extensible,
    check_messages,
    check_place,
    check_record,
    check_turn,
    checked_completion,
    copied_messages,
    incomparable,
)

__all__ = ["TrajectoryForest", "check_forest"]


class TrajectoryForest:
    """An append-only forest of turns, each of which holds what it added.

    Args:
        match: When a message counts as the one that is held: ``strict``, ``loose``, or a function of both.
        max_nodes: Turns that the session may have. Far more turns than an agent takes mean that it does not repeat the
            conversation as it was, so that every request starts a tree.

    Raises:
        ConfigError: an unknown way to match, or ``max_nodes`` below 1.

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
        check_count(max_nodes, "max_nodes", "a session has at least one turn")
        self.max_nodes = max_nodes
        self.nodes: list[Node] = []
        """Every turn, in the order of commits."""
        self.mismatches = 0
        """Turns that continue another one whose tokens they do not continue."""
        self._children: defaultdict[int | None, list[int]] = defaultdict(list)
        # A session mostly goes on where it was last: what was put together for one turn begins the next.
        self._known_context: tuple[int, TokenIds] = (-1, np.empty(0, np.int32))

    def attach(self, messages: Sequence[Message], tools: Tools | None = None, *, under_way: int = 0) -> Attachment:
        """Find the deepest turn whose messages, reply included, begin the request.

        Of several equally deep ones the latest is taken. Nothing is locked or reserved: two requests that attach to one
        turn become siblings.

        Args:
            messages: The whole conversation, as the client sent it.
            tools: Of the request.
            under_way: Requests that were attached before and will be added; they count against ``max_nodes``.

        Raises:
            SessionError: messages or tools that are no list of mappings, or that cannot be compared.
            PathEndedError: that turn ended by length.
            NodeLimitError: the session has as many turns as it may have.
            ConfigError: ``under_way`` below 0.
        """
        check_messages(messages)
        if tools is not None:
            check_messages(tools, "tools of the request")
        check_count(under_way, "under_way", "requests under way will be turns", least=0)
        self._check_room(under_way)
        try:
            node, matched = self._deepest(messages)
        except Exception as error:  # Comparing runs code of whatever the messages hold, and of a rule of one's own.
            raise incomparable(error) from error
        check_extensible(node)
        return Attachment(None if node is None else node.seq, tuple(messages[matched:]), tools)

    def commit(
        self,
        attachment: Attachment,
        prompt_token_ids: Sequence[int] | NDArray[Any],
        completion: Completion,
        *,
        committed_at: float | None = None,
    ) -> Node:
        """Add a turn: ``prepare`` and ``add`` in one.

        Raises:
            SessionError, PathEndedError, NodeLimitError: as these.
        """
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
            SessionError: an attachment to no turn of this forest; tokens, log-probs or routed experts that are none
                or do not fit each other; messages that cannot be copied.
            PathEndedError: as for ``attach``.
        """
        check_attachment(attachment)
        at = time.time() if committed_at is None else committed_at
        check_committed_at(at)
        parent = self._parent(attachment.parent)
        check_extensible(parent)
        prompt = as_token_ids(prompt_token_ids, "prompt_token_ids")
        completion = checked_completion(completion, len(prompt))
        held = 0 if parent is None else parent.context_length
        extends = parent is not None and np.array_equal(prompt[:held], self.token_ids(parent.seq))
        if not extends:
            held = 0
        if completion.routed_experts is not None:
            completion = replace(completion, routed_experts=completion.routed_experts[max(held - 1, 0) :].copy())
        return self._turn(attachment, prompt[held:], completion, extends, at)

    def add(self, turn: Node) -> Node:
        """Add a turn that ``prepare`` of this forest made; it gets the next ``seq``.

        Raises:
            SessionError: a turn that does not fit the turns of this forest.
            NodeLimitError: the session has as many turns as it may have.
        """
        check_turn(turn)
        check_place(turn, self._parent(turn.parent))
        self._check_room()
        return self._append(turn)

    def replay(self, record: Mapping[str, Any]) -> Node:
        """Add a turn from its ``Node.record``, after those that were added before it, however many they may be by now.

        Raises:
            SessionError: a record that is not the next one, is none, or does not fit the turns before it.
            PathEndedError: it continues a turn that ended by length.
        """
        check_record(record)
        extends = not record["starts_row"]
        parent = self._parent(record["parent"])
        # Of a turn that was written down before it was added, the journal knows the order.
        if record["seq"] not in (-1, len(self.nodes)) or (extends and parent is None):
            raise SessionError(
                f"record of turn {shown(record['seq'])}",
                got=f"a session of {len(self.nodes)} turns",
                expected="the turns before it, each once and in the order of commits",
                reason="a record holds only what its turn added",
                remedy="replay all records of one session in their order",
            )
        check_extensible(parent)
        prompt = as_token_ids(record["new_prompt_token_ids"], "new_prompt_token_ids")
        completion = Completion(**record["completion"])
        held = 0 if parent is None or not extends else parent.context_length
        # Behind a parent, its last token is the first that the turn routed.
        completion = checked_completion(completion, len(prompt) + (held > 0))
        attachment = Attachment(record["parent"], tuple(record["suffix"]), record["tools"])
        return self._append(self._turn(attachment, prompt, completion, extends, record["committed_at"]))

    def node(self, seq: int) -> Node:
        """The turn of that number.

        Raises:
            SessionError: there is none; ``path``, ``messages`` and the tokens of a turn raise it as well.
        """
        if isinstance(seq, bool) or not isinstance(seq, int | np.integer) or not 0 <= seq < len(self.nodes):
            raise SessionError(
                "turn of a session",
                got=f"the turn {shown(seq)}",
                expected=f"one of the {len(self.nodes)} turns of this session, numbered from 0",
                reason="turns belong to one session, and are there once they are committed",
                remedy="attach, commit and ask with the same forest",
            )
        return self.nodes[seq]

    def leaves(self) -> list[Node]:
        """Turns that none continues, in the order of commits."""
        return [node for node in self.nodes if not self._children.get(node.seq)]

    def path(self, seq: int) -> list[Node]:
        """The turns from the start of the tree to this one."""
        nodes = [self.node(seq)]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(self.nodes[parent])
        return nodes[::-1]

    def messages(self, seq: int) -> list[Message]:
        """The conversation up to the reply of a turn."""
        return [message for node in self.path(seq) for message in node.messages()]

    def token_ids(self, seq: int) -> TokenIds:
        """The tokens of a turn, prompt and completion ``[context_length]``; not to be written to."""
        known, ids = self._known_context
        pieces: list[TokenIds] = []
        step: int | None = self.node(seq).seq
        while step is not None:
            if step == known:
                pieces.append(ids)
                break
            node = self.nodes[step]
            pieces += [node.completion.token_ids, node.new_prompt_token_ids]
            step = None if node.starts_row else node.parent
        if seq != known:
            ids = np.concatenate(pieces[::-1])
            ids.flags.writeable = False
            self._known_context = (seq, ids)
        return ids

    def prompt_token_ids(self, seq: int) -> TokenIds:
        """The prompt of a turn as it was sent, ``[prompt_length]``."""
        return self.token_ids(seq)[: self.node(seq).prompt_length]

    def _deepest(self, messages: Sequence[Message]) -> tuple[Node | None, int]:
        """The node to attach to, and how many messages it covers."""
        best, best_matched = None, 0
        open_nodes = [(seq, 0) for seq in self._children.get(None, ())]
        while open_nodes:
            seq, offset = open_nodes.pop()
            node = self.nodes[seq]
            matched = offset + len(node.suffix) + 1
            if matched > len(messages) or not all(map(self._matches, node.messages(), messages[offset:matched])):
                continue
            if matched > best_matched or (best is not None and matched == best_matched and seq > best.seq):
                best, best_matched = node, matched
            open_nodes.extend((child, matched) for child in self._children.get(seq, ()))
        return best, best_matched

    def _turn(
        self, attachment: Attachment, new_prompt: TokenIds, completion: Completion, extends: bool, committed_at: float
    ) -> Node:
        parent = self._parent(attachment.parent)
        held = parent.context_length if parent is not None and extends else 0
        return Node(
            seq=-1,
            parent=attachment.parent,
            suffix=copied_messages(attachment.suffix, "messages of the request"),
            tools=copied_messages(attachment.tools, "tools of the request"),
            new_prompt_token_ids=new_prompt.copy(),
            completion=completion,
            prompt_length=held + len(new_prompt),
            context_length=held + len(new_prompt) + len(completion.token_ids),
            starts_row=not extends,
            committed_at=committed_at,
        )

    def _append(self, turn: Node) -> Node:
        node = replace(turn, seq=len(self.nodes))
        self.nodes.append(node)
        self.mismatches += node.parent is not None and node.starts_row
        self._children[node.parent].append(node.seq)
        return node

    def _parent(self, seq: int | None) -> Node | None:
        return None if seq is None else self.node(seq)

    def _check_room(self, under_way: int = 0) -> None:
        if len(self.nodes) + under_way >= self.max_nodes:
            raise NodeLimitError(
                "session",
                got=f"{len(self.nodes)} turns and one more"
                + (f" beside {under_way} under way" if under_way else "")
                + f", {len(self._children.get(None, ()))} of which start a tree",
                expected=f"at most max_nodes = {self.max_nodes}",
                reason="an agent that does not repeat the conversation as it was starts a tree with every request",
                remedy="send back replies unchanged or match them loosely; or raise max_nodes",
            )


def check_forest(forest: Any) -> None:
    """A session whose turns can be asked for.

    Raises:
        SessionError: anything else.
    """
    if not isinstance(forest, TrajectoryForest):
        raise SessionError(
            "forest",
            got=shown(forest),
            expected="a TrajectoryForest",
            reason="prompts and rows are made of its turns",
            remedy="pass the forest that the requests were attached to",
        )
