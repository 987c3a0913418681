"""Sessions that Miles' server v2 recorded, replayed: its rows, token by token.

Upstream leaves out the line feed that the chat template puts behind the end of a reply; here it is rendered, as the
model would read it in a conversation that is rendered at once. Everything else is compared exactly.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import STOP, Chat, assistant
from recorded_sessions import SESSIONS, completion_of

from miles_norm import NormalizationConfig, Sample, normalize_rewards, read_dump
from miles_norm.session.assembly import assemble, session_metadata
from miles_norm.session.completion import Completion
from miles_norm.session.hooks import assign_reward, drop_retries
from miles_norm.session.node import Attachment
from miles_norm.session.prompt import next_prompt
from miles_norm.session.tree import TrajectoryForest

FAST = Path(__file__).parents[1]
TREES = json.loads((FAST / "data/session_trees.json").read_text(encoding="utf-8"))
CHAT = Chat()
LINE_FEED = CHAT.encode("\n")[0]


@functools.cache
def upstream_rows() -> list[dict[str, Any]]:
    return read_dump(FAST.parents[1] / "examples/data/miles_session_v2.pt").samples


@functools.cache
def forest_of(number: int) -> TrajectoryForest:
    """The session's requests in the order of commits, each attached by its messages alone."""
    forest, seqs = TrajectoryForest(), {}
    for request in SESSIONS[number]["requests"]:
        attachment = forest.attach(request["messages"])
        assert attachment.parent == seqs.get(request["parent"])
        prompt = next_prompt(forest, attachment, CHAT)
        seqs[request["request"]] = forest.commit(attachment, prompt.token_ids, completion_of(request)).seq
    return forest


def rows_of(number: int, **settings: Any) -> list[Sample]:
    session = SESSIONS[number]
    base = Sample(group_index=session["group_index"], index=session["sample_index"])
    settings = {"post_processors": [assign_reward], "agent": {"reward": session["reward"]}} | settings
    return assemble(forest_of(number), base, **settings)


def without_line_feeds(row: Sample) -> dict[str, list[Any]]:
    """Tokens, mask and log-probs of a row without the line feeds that end the replies before the last one."""
    start = len(row.tokens) - row.response_length
    added = [
        n
        for n in range(start + 1, len(row.tokens))
        if row.tokens[n] == LINE_FEED and row.tokens[n - 1] == STOP and row.rollout_log_probs[n - 1 - start] != 0
    ]
    inside = [n - start for n in added]
    assert not row.loss_mask[inside].any()
    return {
        "tokens": np.delete(row.tokens, added).tolist(),
        "loss_mask": np.delete(row.loss_mask, inside).tolist(),
        "rollout_log_probs": np.delete(row.rollout_log_probs, inside).tolist(),
        "line_feeds": added,
    }


@pytest.mark.parametrize("number", range(24))
def test_rows_are_those_of_upstream(number: int) -> None:
    expected = SESSIONS[number]["expected_rows"]
    rows = rows_of(number)
    assert len(rows) == len(expected)
    for row, one in zip(rows, expected, strict=True):
        path = [
            int(forest_of(number).nodes[seq].completion.response_id) for seq in row.metadata["leaf"]["path_node_ids"]
        ]
        assert path == one["path"]
        assert row.status == one["status"]
        assert int(row.loss_mask.sum()) == one["trainable_tokens"]
        dumped, ours = upstream_rows()[one["dump_row"]], without_line_feeds(row)
        assert ours["tokens"] == dumped["tokens"]
        assert ours["loss_mask"] == dumped["loss_mask"]
        assert ours["rollout_log_probs"] == dumped["rollout_log_probs"]
        for name in ("group_index", "index", "weight_versions", "reward"):
            assert getattr(row, name) == dumped[name]
        # Upstream leaves the id out where a rollout has one row.
        assert row.rollout_id == row.index == dumped["index"]


@pytest.mark.parametrize("number", range(24))
def test_every_request_is_trained_where_upstream_trains_it(number: int) -> None:
    requests = {str(request["request"]): request for request in SESSIONS[number]["requests"]}
    spans = {
        node["response_id"]: node["completion_span"] for node in session_metadata(forest_of(number))["tree"]["nodes"]
    }
    for row, one in zip(rows_of(number), SESSIONS[number]["expected_rows"], strict=True):
        start = len(row.tokens) - row.response_length
        for name, trainable in one["trainable_tokens_by_request"].items():
            begin, end = spans[name]
            assert row.tokens[begin:end].tolist() == requests[name]["completion_token_ids"]
            log_probs = np.float32(requests[name]["completion_log_probs"])
            assert np.array_equal(row.rollout_log_probs[begin - start : end - start], log_probs)
            assert row.loss_mask[begin - start : end - start].tolist() == [int(trainable > 0)] * (end - begin)


def test_rows_read_as_the_conversation_rendered_at_once() -> None:
    """One line feed for each reply that another turn follows; upstream has none of them."""
    for number, session in enumerate(SESSIONS):
        for row in rows_of(number):
            path = row.metadata["leaf"]["path_node_ids"]
            text = CHAT.render(forest_of(number).messages(path[-1]), add_generation_prompt=False)
            assert CHAT.decode(row.tokens.tolist()) == text.removesuffix(
                "\n" if row.status == "completed" else "<|im_end|>\n"
            )
            assert len(without_line_feeds(row)["line_feeds"]) == len(path) - 1
        assert session["sample_index"] == number


def test_the_whole_batch_in_upstream_order_and_its_advantages() -> None:
    rows = [row for number in range(24) for row in rows_of(number)]
    assert len(rows) == len(upstream_rows()) == 58
    assert [one["dump_row"] for session in SESSIONS for one in session["expected_rows"]] == list(range(58))
    for config in (NormalizationConfig(), NormalizationConfig(advantage_estimator="dr_grpo")):
        ours, theirs = normalize_rewards(rows, config), normalize_rewards(upstream_rows(), config)
        assert ours.advantages.tolist() == theirs.advantages.tolist()
        assert ours.mainstream_rows.tolist() == theirs.mainstream_rows.tolist()


def recorded_tree(tree: dict[str, Any]) -> TrajectoryForest:
    """A forest of the recorded shape: its spans, with tokens and messages made up."""
    forest = TrajectoryForest()
    for node in tree["nodes"]:
        start, stop = node["completion_span"]
        before = np.empty(0, np.int32) if node["parent"] is None else forest.token_ids(node["parent"])
        prompt = np.concatenate([before, np.full(start - len(before), 7, np.int32)])
        completion = Completion(
            message=assistant(str(node["id"])),
            token_ids=np.full(stop - start, 8),
            log_probs=np.zeros(stop - start),
            finish_reason="length" if node["truncated"] else "stop",
        )
        forest.commit(Attachment(node["parent"], ({"role": "user", "content": "?"},)), prompt, completion)
    return forest


@pytest.mark.parametrize("number", TREES)
def test_the_default_picker_of_upstream(number: str) -> None:
    """The attempts that were superseded are in these trees; the leaves that upstream kept are in the dump."""
    forest = recorded_tree(TREES[number])
    table = session_metadata(forest)["tree"]
    assert table["leaves"] == TREES[number]["leaves"]
    for ours, theirs in zip(table["nodes"], TREES[number]["nodes"], strict=True):
        assert {name: ours[name] for name in theirs} == theirs
    kept = [row["metadata"]["leaf"]["path_node_ids"] for row in upstream_rows() if row["index"] == int(number)]
    rows = assemble(forest, Sample(index=int(number)), drop_retries)
    assert [row.metadata["leaf"]["path_node_ids"] for row in rows] == kept


def test_some_attempts_were_superseded() -> None:
    leaves = [len(tree["leaves"]) for tree in TREES.values()]
    assert sum(leaves) - 58 == 13
