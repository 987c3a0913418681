"""What holds for every session: each sampled token is trained once, whole turns, in the row that owns it."""

import math
from typing import Any

import numpy as np
import pytest
from conversations import STOP, Chat, Session, assistant, reply, user
from hypothesis import given
from hypothesis import strategies as st
from random_sessions import row_tokens, sampled_tokens, sessions, turns_in_rows

from miles_norm import NormalizationConfig, Sample, normalize_rewards
from miles_norm.session.assembly import assemble
from miles_norm.session.hooks import assign_reward, drop_retries, keep_all
from miles_norm.session.node import Attachment
from miles_norm.session.tree import TrajectoryForest
from miles_norm.session.wire import decode_node, decode_rows, encode_node, encode_rows

BASE = Sample(group_index=0, index=0)
LIMITS = st.one_of(st.none(), st.integers(1, 200))


@st.composite
def picked(draw: Any) -> tuple[TrajectoryForest, set[int], int | None]:
    """A session, some of its leaves, and a limit to the length of rows."""
    forest = draw(sessions()).forest
    kept = {leaf.seq for leaf in forest.leaves() if draw(st.integers(0, 3))}
    return forest, kept, draw(LIMITS)


def rows_of(forest: TrajectoryForest, kept: set[int], limit: int | None) -> list[Sample]:
    def picker(leaves: list[Sample], _: Any) -> list[Sample]:
        return [leaf for leaf in leaves if leaf.metadata["leaf"]["node_id"] in kept]

    return assemble(forest, BASE, picker, max_seq_len=limit)


@given(picked())
def test_every_kept_completion_is_trained_exactly_once(drawn: tuple[TrajectoryForest, set[int], int | None]) -> None:
    forest, kept, limit = drawn
    turns = {node.seq: node for leaf in kept for row in turns_in_rows(forest, leaf, limit or math.inf) for node in row}
    trained = [token for row in rows_of(forest, kept, limit) for token in row_tokens(row)]
    assert sorted(trained) == sorted(sampled_tokens(list(turns.values())))


@given(sessions())
def test_without_a_limit_every_turn_is_trained_once(session: Session) -> None:
    """Written down without rows, paths and parts: all that was sampled."""
    rows = assemble(session.forest, BASE)
    trained = [token for row in rows for token in row_tokens(row)]
    assert sorted(trained) == sorted(sampled_tokens(session.forest.nodes))
    assert [row.metadata["leaf"]["left_out_node_ids"] for row in rows] == [[]] * len(rows)


@given(picked())
def test_a_row_is_named_by_what_it_holds(drawn: tuple[TrajectoryForest, set[int], int | None]) -> None:
    """Its path is exactly the turns in its response; a kept turn is in a row, or every row of its leaf names it."""
    forest, kept, limit = drawn
    rows = rows_of(forest, kept, limit)
    for row in rows:
        held = [forest.nodes[seq] for seq in row.metadata["leaf"]["path_node_ids"]]
        assert row_tokens(row, masked=True) == sampled_tokens(held)
    for leaf in kept:
        own = [row.metadata["leaf"] for row in rows if row.metadata["leaf"]["node_id"] == leaf]
        in_rows = {seq for row in rows for seq in row.metadata["leaf"]["path_node_ids"]}
        missing = [node.seq for node in forest.path(leaf) if node.seq not in in_rows]
        assert all(place["left_out_node_ids"] == missing for place in own)


@given(picked())
def test_a_shared_turn_is_trained_in_the_kept_leaf_that_was_committed_first(
    drawn: tuple[TrajectoryForest, set[int], int | None],
) -> None:
    forest, kept, limit = drawn
    owner: dict[int, int] = {}
    for leaf in sorted(kept, reverse=True):
        owner |= {node.seq: leaf for row in turns_in_rows(forest, leaf, limit or math.inf) for node in row}
    for row in rows_of(forest, kept, limit):
        trained = row_tokens(row)
        leaf = row.metadata["leaf"]["node_id"]
        own = [forest.nodes[seq] for seq in row.metadata["leaf"]["path_node_ids"] if owner.get(seq) == leaf]
        assert trained == sampled_tokens(own)


@given(picked())
def test_turns_are_whole(drawn: tuple[TrajectoryForest, set[int], int | None]) -> None:
    """Of every turn in a row all tokens with all log-probs, trainable or masked together, where it was sampled."""
    forest, kept, limit = drawn
    expected = {
        tuple(node.seq for node in row) for leaf in kept for row in turns_in_rows(forest, leaf, limit or math.inf)
    }
    for row in rows_of(forest, kept, limit):
        assert limit is None or len(row.tokens) <= limit
        assert len(row.loss_mask) == len(row.rollout_log_probs) == row.response_length
        path = row.metadata["leaf"]["path_node_ids"]
        assert tuple(path) in expected
        nodes = [forest.nodes[seq] for seq in path]
        assert row_tokens(row, masked=True) == sampled_tokens(nodes)
        assert row.tokens.tolist() == forest.token_ids(nodes[-1].seq).tolist()
        start = nodes[0].prompt_length
        for node in nodes:
            assert len(set(row.loss_mask[node.prompt_length - start : node.context_length - start].tolist())) <= 1
        continued = forest.path(row.metadata["leaf"]["node_id"])[len(forest.path(path[-1])) :][:1]
        cut = nodes[-1].completion.finish_reason != "abort" and any(
            not node.starts_row and node.context_length > (limit or math.inf) for node in continued
        )
        reason = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}
        assert row.status == ("truncated" if cut else reason[nodes[-1].completion.finish_reason])


@given(picked())
def test_rows_come_in_order_and_one_for_each_leaf(drawn: tuple[TrajectoryForest, set[int], int | None]) -> None:
    forest, kept, limit = drawn
    rows = rows_of(forest, kept, limit)
    keys = [(len(row.metadata["leaf"]["path_node_ids"]), row.metadata["leaf"]["path_node_ids"][-1]) for row in rows]
    assert keys == sorted(keys, reverse=True)
    fitting = {leaf for leaf in kept if turns_in_rows(forest, leaf, limit or math.inf)}
    assert {row.metadata["leaf"]["node_id"] for row in rows} == fitting
    if limit is None:
        ends = [row for row in rows if row.metadata["leaf"]["path_node_ids"][-1] == row.metadata["leaf"]["node_id"]]
        assert len(ends) == len(kept)
    # An earlier part of a path is there only if it holds a turn that no leaf committed before has.
    for row in rows:
        path, leaf = row.metadata["leaf"]["path_node_ids"], row.metadata["leaf"]["node_id"]
        if path[0] != turns_in_rows(forest, leaf, limit or math.inf)[-1][0].seq:
            earlier = {node.seq for other in kept if other < leaf for node in forest.path(other)}
            assert not earlier.issuperset(path)


@given(st.permutations(range(4)), st.lists(st.sampled_from([0, 0, 1]), min_size=4, max_size=4), st.booleans())
def test_the_order_of_sibling_commits_decides_ownership_and_nothing_else(
    order: list[int], depths: list[int], linked: bool
) -> None:
    """Four requests race on one turn; some are continued afterwards, so that their leaf is another turn."""
    chat, forest = Chat(), TrajectoryForest()
    root = forest.commit(forest.attach([user("q")]), chat.encode("q"), reply(chat, "root", seq=0))
    seqs = {}
    for label in order:
        prompt = np.concatenate([forest.token_ids(root.seq), chat.encode(f"{label}")])
        seqs[label] = forest.commit(Attachment(0, (user(str(label)),)), prompt, reply(chat, "xy", seq=10 + label)).seq
    for label in order if linked else sorted(order):
        if depths[label]:
            node = forest.nodes[seqs[label]]
            prompt = np.concatenate([forest.token_ids(node.seq), chat.encode("more")])
            seqs[label] = forest.commit(Attachment(node.seq, ()), prompt, reply(chat, "z", seq=20 + label)).seq
    rows = assemble(forest, BASE)
    # The same rows and the same trained tokens, whatever the order was.
    contexts = sorted(row.tokens.tolist() for row in rows)
    assert contexts == sorted(
        [*forest.token_ids(0), *chat.encode(f"{label}xy"), STOP, *[*chat.encode("morez"), STOP] * depths[label]]
        for label in range(4)
    )
    trained = sorted(token for row in rows for token in row_tokens(row))
    assert trained == sorted(sampled_tokens(forest.nodes))
    # The turn that they share is trained in the row of the leaf that was committed first.
    first = min(seqs.values())
    owners = [row.metadata["leaf"]["node_id"] for row in rows if row.loss_mask[0]]
    assert owners == [first]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=6), st.sampled_from([None, "ro"]))
def test_a_linear_conversation_is_the_plain_single_trajectory(turns: list[tuple[int, int]], rollout_id: Any) -> None:
    """Against the assembly of a server that knows one trajectory: lists, put one behind the other."""
    session, messages = Session(), []
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    versions: list[str] = []
    for number, (asked, answered) in enumerate(turns):
        messages.append(user("q" * asked))
        node = session.turn(messages, "a" * answered, weight_version=f"v{number}")
        messages.append(assistant("a" * answered))
        between = session.forest.prompt_token_ids(node.seq).tolist()[len(tokens) :]
        sampled = node.completion.token_ids.tolist()
        if number:
            mask += [0] * len(between)
            log_probs += [0.0] * len(between)
        tokens += between + sampled
        mask += [1] * len(sampled)
        log_probs += node.completion.log_probs.tolist()
        versions.append(f"v{number}")
    base = Sample(group_index="g", index=5, rollout_id=rollout_id, label="l", metadata={"a": 1})
    [row] = assemble(session.forest, base)
    assert row.tokens.tolist() == tokens
    assert row.loss_mask.tolist() == mask
    assert row.rollout_log_probs.tolist() == log_probs
    assert row.response_length == len(mask)
    assert (row.weight_versions, row.status) == (versions, "completed")
    assert (row.group_index, row.index, row.rollout_id, row.label) == ("g", 5, rollout_id or 5, "l")
    assert row.metadata.pop("leaf")["path_node_ids"] == list(range(len(turns)))
    assert row.metadata == {"a": 1}
    assert str(assemble(session.forest, base, drop_retries)) == str(assemble(session.forest, base, keep_all))


@given(sessions(), LIMITS)
def test_a_replayed_session_gives_the_same_rows_and_takes_the_same_requests(
    session: Session, limit: int | None
) -> None:
    again = TrajectoryForest()
    for node in session.forest.nodes:
        decode_node(again, encode_node(node))
    rows, replayed = (assemble(forest, BASE, max_seq_len=limit) for forest in (session.forest, again))
    assert encode_rows(rows) == encode_rows(replayed)
    for node in session.forest.nodes:
        if not node.truncated:
            request = session.then(node, "and now?")
            try:
                expected = session.forest.attach(request)
            except ValueError as error:
                with pytest.raises(type(error)):
                    again.attach(request)
            else:
                assert again.attach(request) == expected


@given(sessions())
def test_rows_come_back_from_bytes(session: Session) -> None:
    rows = assemble(session.forest, Sample(group_index="g", index=1, reward=0.5, extra={"x": (1, 2)}))
    back, metadata = decode_rows(encode_rows(rows, {"a": None}))
    assert metadata == {"a": None}
    for ours, theirs in zip(back, rows, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert str(ours) == str(theirs)


@given(st.lists(sessions(max_turns=6), min_size=1, max_size=4), st.data())
def test_advantages_do_not_depend_on_the_picker(drawn: list[Session], data: st.DataObject) -> None:
    """When all leaves of a rollout have its reward; from turns to advantages."""
    rewards = [data.draw(st.sampled_from([0.0, 1.0, 0.25])) for _ in drawn]
    config = NormalizationConfig(advantage_estimator=data.draw(st.sampled_from(["grpo", "dr_grpo", "rloo"])))

    def one_of_them(leaves: list[Sample], _: Any) -> list[Sample]:
        return [data.draw(st.sampled_from(leaves))]

    found = []
    for picker in (keep_all, drop_retries, one_of_them):
        rows = [
            row
            for index, (session, reward) in enumerate(zip(drawn, rewards, strict=True))
            for row in assemble(
                session.forest,
                Sample(group_index=index // 2, index=index),
                picker,
                [assign_reward],
                agent={"reward": reward},
            )
        ]
        result = normalize_rewards(rows, config)
        assert result.index.num_rollouts == len(drawn)
        assert not any("sibling" in warning or "id" in warning.split() for warning in result.warnings)
        found.append(result.rollout_advantages.tolist())
    assert found[0] == found[1] == found[2]
