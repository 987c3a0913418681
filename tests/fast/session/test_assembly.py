"""Rows of small forests, worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conversations import STOP, Chat, Session, StripsThinking, reply, user

from miles_norm import Sample, convert_samples_to_train_data
from miles_norm.errors import ConfigError, SessionError
from miles_norm.session.assembly import assemble, session_metadata
from miles_norm.session.hooks import drop_retries, keep_all
from miles_norm.session.node import Attachment, Node
from miles_norm.session.tree import TrajectoryForest

BASE = Sample(group_index=3, index=7, prompt="2 + 2?", label="4", metadata={"task": "t"}, extra={"run": "a"})


def forest_of(*turns: tuple[int | None, Sequence[int], int], **finish_reasons: str) -> TrajectoryForest:
    """Turns as (parent, tokens behind those of the parent, tokens sampled); ``_2="abort"`` for the end of turn 2.

    A prompt that does not begin with the parent's tokens is given whole, negative: as (parent, [-9, -8], 1).
    Sampled tokens are 100 * (seq + 1) + their number, and their log-probs -1 - seq - number / 1024.
    """
    forest = TrajectoryForest()
    for seq, (parent, new, sampled) in enumerate(turns):
        before: Sequence[int] = [] if parent is None else forest.token_ids(parent).tolist()
        prompt = [-token for token in new] if any(token < 0 for token in new) else [*before, *new]
        completion = reply(
            Chat(),
            "",
            seq=seq,
            token_ids=np.arange(sampled) + 100 * (seq + 1),
            log_probs=-1 - seq - np.arange(sampled) / 1024,
            finish_reason=finish_reasons.get(f"_{seq}", "stop"),
            weight_version=f"v{seq}",
        )
        forest.commit(Attachment(parent, (user(str(seq)),)), prompt, completion, committed_at=0.0)
    return forest


def paths(rows: Sequence[Sample]) -> list[list[int]]:
    return [row.metadata["leaf"]["path_node_ids"] for row in rows]


def trained(row: Sample) -> list[int]:
    return row.tokens[len(row.tokens) - row.response_length :][row.loss_mask == 1].tolist()


def test_a_linear_conversation_by_hand() -> None:
    [row] = assemble(forest_of((None, [1, 2], 2), (0, [3], 1)), BASE)
    assert row.tokens.tolist() == [1, 2, 100, 101, 3, 200]
    assert row.response_length == 4
    assert row.loss_mask.tolist() == [1, 1, 0, 1]
    assert row.rollout_log_probs.tolist() == [-1, -1 - 1 / 1024, 0, -2]
    assert row.weight_versions == ["v0", "v1"]
    assert row.status == "completed"
    assert (row.group_index, row.index, row.rollout_id) == (3, 7, 7)
    assert (row.prompt, row.label, row.run, row.reward) == ("2 + 2?", "4", "a", None)
    leaf = {"node_id": 1, "parent": 0, "path_node_ids": [0, 1], "response_id": "r1", "left_out_node_ids": []}
    assert row.metadata == {"task": "t", "leaf": leaf}
    assert [value.dtype for value in (row.tokens, row.loss_mask, row.rollout_log_probs)] == [
        np.int32,
        np.uint8,
        np.float32,
    ]


def test_shared_turns_are_trained_in_the_leaf_committed_first() -> None:
    #  0 - 1 - 3        leaves 3 and 2 and 4: leaf 2 is the first
    #    \ 2    4 (root)
    forest = forest_of((None, [1], 1), (0, [2], 1), (0, [3], 1), (1, [4], 1), (None, [5], 2))
    rows = assemble(forest, BASE)
    assert paths(rows) == [[0, 1, 3], [0, 2], [4]]
    assert [trained(row) for row in rows] == [[200, 400], [100, 300], [500, 501]]
    # The shared turn keeps its log-prob where it is masked.
    assert rows[0].rollout_log_probs.tolist() == [-1, 0, -2, 0, -4]
    assert rows[0].loss_mask.tolist() == [0, 0, 1, 0, 1]
    # Without leaf 2, ownership passes on.
    rows = assemble(forest, BASE, lambda leaves, _: [leaf for leaf in leaves if leaf.metadata["leaf"]["node_id"] != 2])
    assert [trained(row) for row in rows] == [[100, 200, 400], [500, 501]]


def test_order_of_rows() -> None:
    """Number of turns, then commit, both descending, whatever the picker's order."""
    forest = forest_of((None, [1], 1), (0, [2], 1), (0, [3], 1), (2, [4], 1), (None, [5], 1), (None, [6], 1))
    assert paths(assemble(forest, BASE)) == [[0, 2, 3], [0, 1], [5], [4]]
    assert paths(assemble(forest, BASE, lambda leaves, _: leaves[::-1])) == [[0, 2, 3], [0, 1], [5], [4]]


def test_a_mismatch_starts_a_row() -> None:
    forest = forest_of((None, [1], 2), (0, [2], 1), (1, [-7, -8], 1), (2, [9], 1))
    rows = assemble(forest, BASE)
    # Of equally many turns the later comes first.
    assert paths(rows) == [[2, 3], [0, 1]]
    assert [row.tokens.tolist() for row in rows] == [[7, 8, 300, 9, 400], [1, 100, 101, 2, 200]]
    assert [trained(row) for row in rows] == [[300, 400], [100, 101, 200]]
    # Both are rows of the one leaf, and of the one rollout.
    assert [row.metadata["leaf"]["node_id"] for row in rows] == [3, 3]
    assert [row.metadata["leaf"]["response_id"] for row in rows] == ["r3", "r3"]
    assert [row.rollout_id for row in rows] == [7, 7]
    assert session_metadata(forest)["tree"]["mismatches"] == forest.mismatches == 1


def test_a_part_of_a_path_that_another_leaf_trains_is_no_row() -> None:
    # Leaf 2 holds turns 0 and 1; leaf 3 continues 1 with another rendering, so that 0 and 1 would end in a row of it.
    forest = forest_of((None, [1], 1), (0, [2], 1), (1, [3], 1), (1, [-9], 1))
    assert paths(assemble(forest, BASE)) == [[0, 1, 2], [3]]
    # Without leaf 2 they do: nothing that leaf 3 went through is lost.
    rows = assemble(forest, BASE, drop_retries)
    assert paths(rows) == [[0, 1], [3]]
    assert [trained(row) for row in rows] == [[100, 200], [400]]


def test_two_leaves_whose_paths_begin_with_the_same_part() -> None:
    forest = forest_of((None, [1], 1), (0, [-8], 1), (0, [-9], 1))
    for picker in (keep_all, lambda leaves, _: leaves[::-1]):
        rows = assemble(forest, BASE, picker)
        assert paths(rows) == [[2], [1], [0]]
        assert [trained(row) for row in rows] == [[300], [200], [100]]
        assert [row.metadata["leaf"]["node_id"] for row in rows] == [2, 1, 1]


@pytest.mark.parametrize(
    ("limit", "tokens", "status"),
    [
        (8, [1, 2, 100, 101, 3, 200, 4, 300], "completed"),
        (7, [1, 2, 100, 101, 3, 200], "truncated"),
        (6, [1, 2, 100, 101, 3, 200], "truncated"),
        (5, [1, 2, 100, 101], "truncated"),
        (4, [1, 2, 100, 101], "truncated"),
    ],
)
def test_rows_are_cut_at_turns(limit: int, tokens: list[int], status: str) -> None:
    [row] = assemble(forest_of((None, [1, 2], 2), (0, [3], 1), (1, [4], 1)), BASE, max_seq_len=limit)
    assert row.tokens.tolist() == tokens
    assert row.status == status
    assert len(row.loss_mask) == len(row.rollout_log_probs) == row.response_length == len(tokens) - 2
    assert row.weight_versions == ["v0", "v1", "v2"][: sum(token % 100 == 0 for token in tokens)]
    # The row says which turns of its leaf it holds, and which are in none.
    held = len(row.weight_versions)
    assert row.metadata["leaf"]["path_node_ids"] == [0, 1, 2][:held]
    assert row.metadata["leaf"]["left_out_node_ids"] == [0, 1, 2][held:]
    assert (row.metadata["leaf"]["node_id"], row.metadata["leaf"]["response_id"]) == (2, "r2")


def test_a_leaf_of_which_nothing_fits_has_no_row(caplog: pytest.LogCaptureFixture) -> None:
    forest = forest_of((None, [1, 2, 3], 2), (None, [1], 1))
    seen: list[Any] = []
    rows = assemble(forest, BASE, lambda leaves, _: seen.extend(leaves) or leaves, max_seq_len=4)
    assert paths(rows) == paths(seen) == [[1]]
    assert caplog.messages == [
        "rollout 7: no row for the leaves at turn 0: all that leads to them has more than max_seq_len = 4 tokens"
    ]
    assert assemble(forest, BASE, max_seq_len=1) == []


def test_the_part_that_fits_stands_for_its_leaf() -> None:
    """The rendering afresh is too long; what came before is still trained, and the picker still sees the leaf."""
    forest = forest_of((None, [1], 1), (0, [2], 1), (1, [-1, -2, -3, -4, -5], 1))
    rows = assemble(forest, BASE, drop_retries, max_seq_len=5)
    assert paths(rows) == [[0, 1]]
    assert rows[0].metadata["leaf"]["node_id"] == 2
    assert rows[0].status == "completed"


def test_leaves_that_are_cut_to_their_shared_turns() -> None:
    """Both have a row; the shared turn is trained in the first of them only."""
    forest = forest_of((None, [1], 1), (0, [2, 3], 1), (0, [4, 5], 1))
    rows = assemble(forest, BASE, max_seq_len=3)
    assert [row.tokens.tolist() for row in rows] == [[1, 100], [1, 100]]
    assert [trained(row) for row in rows] == [[], [100]]
    assert [row.metadata["leaf"]["node_id"] for row in rows] == [2, 1]


def test_status_is_that_of_the_last_turn() -> None:
    for reason, status in (
        ("stop", "completed"),
        ("tool_calls", "completed"),
        ("length", "truncated"),
        ("abort", "aborted"),
    ):
        assert assemble(forest_of((None, [1], 1), (0, [2], 1), _1=reason), BASE)[0].status == status


def test_a_row_ends_at_an_aborted_turn_and_what_continues_it_is_another() -> None:
    """0 - 1 - 2 - 3, and 1 was aborted: its row, and one that has all of it in the prompt."""
    forest = forest_of((None, [1], 2), (0, [2], 1), (1, [3], 1), (2, [4], 1), _1="abort")
    rows = assemble(forest, BASE)
    assert paths(rows) == [[2, 3], [0, 1]]
    assert [row.tokens.tolist() for row in rows] == [
        [1, 100, 101, 2, 200, 3, 300, 4, 400],
        [1, 100, 101, 2, 200],
    ]
    assert [row.response_length for row in rows] == [3, 4]
    assert [row.rollout_log_probs.tolist() for row in rows] == [[-3, 0, -4], [-1, -1 - 1 / 1024, 0, -2]]
    assert [trained(row) for row in rows] == [[300, 400], [100, 101, 200]]
    assert [row.status for row in rows] == ["completed", "aborted"]
    assert [row.weight_versions for row in rows] == [["v2", "v3"], ["v0", "v1"]]
    # Both are rows of leaf 3 and of the one rollout.
    assert [row.metadata["leaf"]["node_id"] for row in rows] == [3, 3]
    assert forest.mismatches == 0
    # What does not fit is named; the aborted turn stays what it was.
    [row] = assemble(forest, BASE, max_seq_len=6)
    assert (paths([row]), row.status, row.metadata["leaf"]["left_out_node_ids"]) == ([[0, 1]], "aborted", [2, 3])


def test_turns_that_continue_an_aborted_one_are_siblings() -> None:
    """Two answers to what was aborted, both kept; the row of what was aborted is there once."""
    forest = forest_of((None, [1], 2), (0, [2], 1), (0, [3], 1), _0="abort")
    rows = assemble(forest, BASE)
    assert paths(rows) == [[2], [1], [0]]
    assert [trained(row) for row in rows] == [[300], [200], [100, 101]]
    # 1 was aborted too: each row has one completion, behind all tokens before it.
    forest = forest_of((None, [1], 2), (0, [2], 1), (1, [3], 1), _0="abort", _1="abort")
    rows = assemble(forest, BASE)
    assert [row.tokens.tolist() for row in rows] == [
        [1, 100, 101, 2, 200, 3, 300], [1, 100, 101, 2, 200], [1, 100, 101]
    ]  # fmt: skip
    assert [trained(row) for row in rows] == [[300], [200], [100, 101]]


def test_a_row_rendered_afresh_does_not_stand_on_aborted_tokens() -> None:
    forest = forest_of((None, [1], 2), (0, [-2], 1), _0="abort")
    assert [(trained(row), row.status) for row in assemble(forest, BASE)] == [
        ([200], "completed"),
        ([100, 101], "aborted"),
    ]


def test_a_turn_without_tokens() -> None:
    [row] = assemble(forest_of((None, [1], 0), (0, [2], 1)), BASE)
    assert (row.tokens.tolist(), row.loss_mask.tolist()) == ([1, 2, 200], [0, 1])
    [row] = assemble(forest_of((None, [1], 0)), BASE)
    assert (row.tokens.tolist(), row.response_length) == ([1], 0)


def test_no_turn_gives_no_row() -> None:
    assert assemble(TrajectoryForest(), BASE) == []


def test_rows_are_the_callers_own() -> None:
    forest = forest_of((None, [1, 2], 2), (0, [3], 1), (0, [4], 1))
    first, again = assemble(forest, BASE), assemble(forest, BASE)
    for row in first:
        for values in (row.tokens, row.loss_mask, row.rollout_log_probs):
            values[:] = 0
        row.metadata["x"] = row.extra["x"] = 1
    assert str(again) == str(assemble(forest, BASE))
    assert BASE.metadata == {"task": "t"}
    assert BASE.extra == {"run": "a"}


@pytest.mark.parametrize(("rollout_id", "index", "found"), [("ro", 7, "ro"), (None, 0, 0), (0, 7, 0), (None, "a", "a")])
def test_every_row_has_the_id_of_its_rollout(rollout_id: Any, index: Any, found: Any) -> None:
    rows = assemble(forest_of((None, [1], 1), (None, [2], 1)), Sample(index=index, rollout_id=rollout_id))
    assert [(row.rollout_id, row.index) for row in rows] == [(found, index)] * 2


def test_a_rollout_needs_an_id() -> None:
    with pytest.raises(SessionError, match=r"got: +neither rollout_id nor index"):
        assemble(forest_of((None, [1], 1)), Sample(group_index=1))


def test_responses_as_text() -> None:
    """What follows the first prompt, special tokens and the messages between included; whole turns of a cut row."""
    session = Session()
    first = session.turn([user("a")], "b")
    session.turn(session.then(first, "c"), "d")
    assert [row.response for row in assemble(session.forest, BASE)] == [""]
    [row] = assemble(session.forest, BASE, renderer=session.chat)
    between = "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert row.response == f"b{between}d<|im_end|>"
    [row] = assemble(session.forest, BASE, renderer=session.chat, max_seq_len=first.context_length)
    assert row.response == "b<|im_end|>"


def test_pickers_see_the_text_of_responses() -> None:
    session = Session()
    for text in ("no", "yes"):
        session.turn([user("a")], text)
    rows = assemble(
        session.forest, BASE, lambda leaves, _: [leaf for leaf in leaves if "yes" in leaf.response],
        renderer=session.chat,
    )  # fmt: skip
    assert paths(rows) == [[1]]


def test_experts_of_what_continues_an_aborted_turn() -> None:
    """The row has those of its whole prompt."""
    forest, _ = with_experts([(None, 3, 2), (0, 1, 2)])
    forest.nodes[0] = replace(forest.nodes[0], completion=replace(forest.nodes[0].completion, finish_reason="abort"))
    rows = assemble(forest, BASE)
    assert paths(rows) == [[1], [0]]
    assert [row.rollout_routed_experts[:, 0, 0].tolist() for row in rows] == [
        [0, 1, 2, 3, 1004, 1005, 1006],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize("limit", [0, -3])
def test_limits_without_room(limit: int) -> None:
    with pytest.raises(ConfigError, match=rf"max_seq_len\n +got: +{limit}"):
        assemble(forest_of((None, [1], 1)), BASE, max_seq_len=limit)


def test_versions_that_the_engine_does_not_say() -> None:
    session = Session()
    first = session.turn([user("a")], "b")
    session.turn(session.then(first, "c"), "d", weight_version="v1")
    assert assemble(session.forest, BASE)[0].weight_versions == ["v1"]


def with_experts(
    turns: Sequence[tuple[int | None, int, int]], layers: int = 2, top_k: int = 3
) -> tuple[TrajectoryForest, list[Any]]:
    """A forest whose engine routes every token of every request anew: turn k's experts are all 1000 * k + position."""
    forest, given = TrajectoryForest(), []
    for seq, (parent, new, sampled) in enumerate(turns):
        before = 0 if parent is None else forest.nodes[parent].context_length
        prompt = np.concatenate(
            [np.empty(0, np.int32) if parent is None else forest.token_ids(parent), np.full(new, 5)]
        )
        rows = before + new + sampled - 1
        experts = np.broadcast_to((1000 * seq + np.arange(rows))[:, None, None], (rows, layers, top_k)).astype(np.int32)
        given.append(experts)
        completion = reply(
            Chat(), "", token_ids=np.full(sampled, 9), log_probs=np.zeros(sampled), routed_experts=experts
        )
        forest.commit(Attachment(parent, ()), prompt, completion)
    return forest, given


def test_experts_are_those_of_the_turn_that_read_a_token_first() -> None:
    """A later turn reads the context again, maybe with other weights; what was sampled was routed when it was sampled.

    Turn 0 has 3 + 2 tokens, so it routed positions 0 to 3. Its last token is first read by turn 1, which routed up to
    position 5 + 1 + 2 - 2 = 6; turn 2 adds positions 7 and 8.
    """
    forest, given = with_experts([(None, 3, 2), (0, 1, 2), (1, 1, 1)])
    [row] = assemble(forest, BASE)
    assert row.rollout_routed_experts.dtype == np.int32
    assert row.rollout_routed_experts.shape == (len(row.tokens) - 1, 2, 3) == (9, 2, 3)
    assert row.rollout_routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 1004, 1005, 1006, 2007, 2008]
    assert np.array_equal(row.rollout_routed_experts[4:7], given[1][4:7])


def test_experts_of_branches_and_cut_rows() -> None:
    forest, _ = with_experts([(None, 3, 2), (0, 1, 2), (0, 2, 1), (2, 1, 1)])
    rows = assemble(forest, BASE)
    assert paths(rows) == [[0, 2, 3], [0, 1]]
    assert rows[0].rollout_routed_experts[:, 1, 2].tolist() == [0, 1, 2, 3, 2004, 2005, 2006, 3007, 3008]
    assert rows[1].rollout_routed_experts[:, 1, 2].tolist() == [0, 1, 2, 3, 1004, 1005, 1006]
    cut = assemble(forest, BASE, max_seq_len=8)
    assert cut[0].rollout_routed_experts[:, 1, 2].tolist() == [0, 1, 2, 3, 2004, 2005, 2006]
    for row in rows:
        row.reward = 1.0
    data = convert_samples_to_train_data(rows)
    assert [len(experts) for experts in data["rollout_routed_experts"].tolists()] == [9, 7]


def test_experts_on_some_turns_only() -> None:
    forest, _ = with_experts([(None, 3, 2), (0, 1, 2)])
    tokens = forest.token_ids(1).tolist()
    forest.commit(Attachment(1, ()), [*tokens, 5], reply(Chat(), "", token_ids=np.array([9]), log_probs=np.zeros(1)))
    with pytest.raises(SessionError, match=r"routed experts of turns 0 to 2\n +got: +none on turn 2"):
        assemble(forest, BASE)
    other = reply(
        Chat(), "", token_ids=np.array([9]), log_probs=np.zeros(1), routed_experts=np.zeros((9, 1, 3), np.int32)
    )
    forest, _ = with_experts([(None, 3, 2), (0, 1, 2)])
    forest.commit(Attachment(1, ()), [*tokens, 5], other)
    with pytest.raises(SessionError, match=r"layers and top-k \[\(1, 3\), \(2, 3\)\]"):
        assemble(forest, BASE)


def test_a_session_with_reasoning_that_the_template_removes() -> None:
    """Through template and prompts: one row per question, and the tool turn stays in the row of its question."""
    session = Session(StripsThinking())
    first: Node = session.turn([user("a")], "hm</think>A")
    second = session.turn(session.then(first, "b"), "hm</think>call")
    session.turn([*session.forest.messages(second.seq), {"role": "tool", "content": "1"}], "hm</think>B")
    rows = assemble(session.forest, BASE)
    assert paths(rows) == [[1, 2], [0]]
    assert [session.chat.decode(trained(row)) for row in rows] == [
        "hm</think>call<|im_end|>hm</think>B<|im_end|>",
        "hm</think>A<|im_end|>",
    ]
    assert session.forest.mismatches == 1
    assert rows[0].tokens[-1] == STOP
