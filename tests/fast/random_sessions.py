"""Sessions for hypothesis: trees, twins, races, retries, ends of every kind, templates that extend or do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from conversations import Chat, Session, StripsThinking, reply, user
from hypothesis import strategies as st

from miles_norm import Sample
from miles_norm.errors import PathEndedError
from miles_norm.session.node import Node
from miles_norm.session.prompt import next_prompt
from miles_norm.session.tree import TrajectoryForest

REASONS = ["stop", "stop", "stop", "stop", "tool_calls", "length", "abort"]
ANSWERS = ["", "4", "ab", "hm</think>4", " x\n"]


@st.composite
def sessions(draw: Any, max_turns: int = 9) -> Session:
    """A session whose requests may be under way at the same time, so that they are committed in another order."""
    session = Session(draw(st.sampled_from([Chat(), Chat(["ab", "4\n"]), StripsThinking()])))
    forest, under_way = session.forest, []
    for _ in range(draw(st.integers(1, max_turns))):
        seq = draw(st.sampled_from([None, *range(len(forest.nodes)), *range(len(forest.nodes))]))
        messages = [] if seq is None else forest.messages(seq)
        messages.append(draw(st.sampled_from([user("a"), user("b"), {"role": "tool", "content": "1"}])))
        try:
            attachment = forest.attach(messages)
        except PathEndedError:
            continue
        under_way.append((attachment, next_prompt(forest, attachment, session.chat)))
        while under_way and draw(st.booleans()):
            finish(draw, session, under_way.pop(draw(st.integers(0, len(under_way) - 1))))
    for request in under_way:
        finish(draw, session, request)
    return session


def finish(draw: Any, session: Session, request: tuple[Any, Any]) -> None:
    attachment, prompt = request
    text, reason = draw(st.sampled_from(ANSWERS)), draw(st.sampled_from(REASONS))
    completion = reply(
        session.chat,
        text,
        seq=len(session.forest.nodes),
        stop=draw(st.booleans()),
        finish_reason=reason,
        weight_version=draw(st.sampled_from([None, "v1"])),
    )
    node = session.forest.commit(attachment, prompt.token_ids, completion, committed_at=0.0)
    assert np.array_equal(session.forest.prompt_token_ids(node.seq), prompt.token_ids)


def turns_in_rows(forest: TrajectoryForest, leaf: int, limit: float) -> list[list[Node]]:
    """The turns of a leaf's path, row by row, without those that a limit cuts off; slowly."""
    path, step = [], leaf
    while step is not None:
        path.insert(0, forest.nodes[step])
        step = forest.nodes[step].parent
    rows: list[list[Node]] = []
    aborted = False
    for node in path:
        context = forest.token_ids(node.seq).tolist()
        before = None if node.parent is None else forest.token_ids(node.parent).tolist()
        if before is None or context[: len(before)] != before or node.prompt_length < len(before) or aborted:
            rows.append([])
        if len(context) <= limit:
            rows[-1].append(node)
        aborted = node.completion.finish_reason == "abort"
    return [row for row in rows if row]


def sampled_tokens(nodes: Sequence[Node]) -> list[tuple[float, int]]:
    """(log-prob, id) of every sampled token; log-probs tell the turns apart."""
    return [
        (float(value), int(token))
        for node in nodes
        for value, token in zip(node.completion.log_probs, node.completion.token_ids, strict=True)
    ]


def row_tokens(row: Sample, *, masked: bool = False) -> list[tuple[float, int]]:
    """(log-prob, id) of the trainable tokens of a row; with ``masked`` of all that were sampled."""
    ids = row.tokens[len(row.tokens) - row.response_length :]
    chosen = row.rollout_log_probs != 0 if masked else row.loss_mask == 1
    assert set(np.unique(row.loss_mask)) <= {0, 1}
    return [(float(value), int(token)) for value, token in zip(row.rollout_log_probs[chosen], ids[chosen], strict=True)]
