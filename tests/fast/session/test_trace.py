"""Agent Lightning's trace levels: its own counts on recorded rollouts, and the rules that it does not keep."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.errors import ConfigError, SampleError
from miles_norm.session.trace import read_completed_rollouts, trace_rows

DATA = Path(__file__).parents[1] / "data"
ROLLOUTS = json.loads((DATA / "agl_rollouts.json").read_text(encoding="utf-8"))
GOLDEN = json.loads((DATA / "agl_golden.json").read_text(encoding="utf-8"))
LEVELS = ["transition", "trajectory"]


def rollout(*calls: tuple[list[int], list[int]], reward: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    triplets = [
        {"prompt": {"token_ids": p}, "response": {"token_ids": r, "log_probs": [-float(t) for t in r]}}
        for p, r in calls
    ]
    return {"rollout_id": "ro", "data_id": "d", "final_reward": reward, "triplets": triplets} | fields


@pytest.mark.parametrize("level", LEVELS)
def test_counts_of_upstream(level: str) -> None:
    golden, metrics = GOLDEN[level], GOLDEN[level]["metrics"]
    found = trace_rows(ROLLOUTS, level)
    rows = found.samples
    assert [row.rollout_id for row in rows] == golden["rollout_id_list"]
    assert [row.group_index for row in rows] == golden["data_id_list"]
    assert [int(row.loss_mask.sum()) for row in rows] == golden["response_mask_sums"]
    assert len(rows) == metrics["training/n_sample"]
    assert found.skipped_empty_rows == metrics["training/n_skipped_empty_rows"]
    assert found.unmerged_rollouts == metrics.get("training/n_unmerged_rollouts", 0)
    assert found.mismatches == metrics.get("training/n_trace_merge_mismatch_rows", 0)
    assert (
        len({row.rollout_id for row in rows}) == metrics["training/n_rollouts_w_trace"] == 8 - len(found.without_trace)
    )
    assert sum(row.metadata["turns"] for row in rows) == metrics["training/n_turns"]
    if level == "transition":
        assert [row.metadata["turn_index"] for row in rows] == golden["turn_index_list"]
    # The one rollout without a reward stays unscored; upstream fills in 0.
    scored = [row for row in rows if row.reward is not None]
    assert {row.rollout_id for row in rows} - {row.rollout_id for row in scored} == {"ro-3729c619c60a"}
    filled = [0.0 if row.reward is None else row.reward for row in rows]
    assert filled == golden["token_level_score_sums"]


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_the_input_is_edited_or_kept(level: str) -> None:
    """Upstream adds the log-probs of merged calls to the list of the first one."""
    given = copy.deepcopy(ROLLOUTS)
    rows = trace_rows(given, level).samples
    assert given == ROLLOUTS
    before = [row.tokens.copy() for row in rows]
    for one in given:
        for triplet in one["triplets"]:
            triplet["response"]["log_probs"].clear()
            triplet["prompt"]["token_ids"].clear()
    assert all(np.array_equal(row.tokens, tokens) for row, tokens in zip(rows, before, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_arrays_and_rewards_are_exact(level: str) -> None:
    # 1/3 has no bfloat16; nor does 0.1 + 2^-40 have a float32.
    rewards = [1 / 3, 0.1 + 2**-40]
    given = [rollout(([1], [2, 3]), reward=reward, rollout_id=number) for number, reward in enumerate(rewards)]
    rows = trace_rows(given, level).samples
    assert [row.reward for row in rows] == rewards
    assert {type(row.reward) for row in rows} == {float}
    for row in rows:
        assert (row.tokens.dtype, row.loss_mask.dtype, row.rollout_log_probs.dtype) == (np.int32, np.uint8, np.float32)


def test_log_probs_of_a_merged_row() -> None:
    [row] = trace_rows([rollout(([1], [2, 3]), ([1, 2, 3, 4, 5], [6]))]).samples
    # Response 2 3 | 4 5 of the next prompt | 6.
    assert row.rollout_log_probs.tolist() == [-2, -3, 0, 0, -6]
    assert row.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert row.response_length == 5


def test_a_call_that_repeats_the_prompt_starts_a_row() -> None:
    found = trace_rows([rollout(([1], [2]), ([1, 2], [3]), ([1], [2]), ([1, 2], [3]), ([9], [2]))])
    assert [row.tokens.tolist() for row in found.samples] == [[1, 2, 3], [1, 2, 3], [9, 2]]
    places = [(row.metadata["turn_index"], row.metadata["turns"]) for row in found.samples]
    assert places == [(0, 2), (2, 2), (4, 1)]
    assert (found.mismatches, found.unmerged_rollouts) == (2, 1)


def test_missing_log_probs_take_those_of_their_row() -> None:
    one = rollout(([1], [2]), ([1, 2], [3]), ([9], [4]))
    one["triplets"][1]["response"]["log_probs"] = None
    rows = trace_rows([one]).samples
    assert rows[0].rollout_log_probs is None
    assert rows[0].loss_mask.tolist() == [1, 1]
    assert rows[1].rollout_log_probs.tolist() == [-4]


def test_rollouts_without_calls_or_tokens() -> None:
    given = [rollout(rollout_id="a"), rollout(([1], []), rollout_id="b"), rollout(triplets=None, rollout_id="c")]
    found = trace_rows([*given, rollout(([1], []), ([1, 2], [3]), rollout_id="d")], "trajectory")
    assert [row.rollout_id for row in found.samples] == ["d"]
    assert found.samples[0].loss_mask.tolist() == [0, 1]
    assert found.skipped_empty_rows == 1
    assert found.without_trace == ("a", "c")
    assert found.without_rows == ("a", "b", "c")


def test_objects_are_read_as_dicts_are() -> None:
    objects = [
        SimpleNamespace(**one | {"triplets": [SimpleNamespace(**triplet) for triplet in one["triplets"]]})
        for one in ROLLOUTS
    ]
    for a, b in zip(trace_rows(objects).samples, trace_rows(ROLLOUTS).samples, strict=True):
        assert (a.tokens.tolist(), a.reward, a.status, a.rollout_id) == (
            b.tokens.tolist(),
            b.reward,
            b.status,
            b.rollout_id,
        )


def test_status_is_that_of_the_last_call() -> None:
    statuses = [row.status for row in trace_rows(ROLLOUTS, "transition").samples]
    reasons = [t["metadata"]["server"]["finish_reason"] for one in ROLLOUTS for t in one["triplets"]]
    assert statuses == ["truncated" if reason == "length" else "completed" for reason in reasons]
    assert "truncated" in statuses
    # A merged row may begin with a call that ended by length.
    number = [one["rollout_id"] for one in ROLLOUTS].index("ro-3729c619c60a")
    assert reasons[sum(len(one["triplets"]) for one in ROLLOUTS[:number])] == "length"
    merged = [row.status for row in trace_rows(ROLLOUTS).samples if row.rollout_id == "ro-3729c619c60a"]
    assert merged == ["completed", "completed"]


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"final_reward": "0.5"}, r"item 1\n +got: +rollout 1: TypeError\(\"final_reward '0.5'\"\)"),
        ({"triplets": [{"prompt": {"token_ids": [1]}, "response": {"token_ids": [2], "log_probs": []}}]},
         r"1 token ids and log_probs of shape \[0\]"),
        ({"triplets": [{"prompt": {"token_ids": [0.5]}, "response": {"token_ids": [2]}}]}, "dtype float64"),
        ({"triplets": [{"prompt": None, "response": {"token_ids": [2]}}]}, "AttributeError"),
        ({"triplets": [{"response": {"token_ids": [2]}}]}, "KeyError"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(broken: dict[str, Any], text: str) -> None:
    with pytest.raises(SampleError, match=text) as raised:
        read_completed_rollouts([rollout(), rollout() | broken])
    assert raised.value.rows == (1,)


def test_all_bad_rollouts_are_named() -> None:
    lacking = [
        {key: value for key, value in rollout().items() if key != name} for name in ("rollout_id", "final_reward")
    ]
    with pytest.raises(SampleError, match=r"items 0, 2") as raised:
        read_completed_rollouts([lacking[0], rollout(), lacking[1]])
    assert raised.value.rows == (0, 2)


def call(**response: Any) -> dict[str, Any]:
    return {"triplets": [{"prompt": {"token_ids": [1]}, "response": {"token_ids": [2, 3]} | response}]}


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (call(log_probs=[-1.0, math.nan]), "response.log_probs: nan at position 1"),
        (call(log_probs=[0.5, 0.25]), "response.log_probs: 0.5, 0.25 at positions 0, 1"),
        (call(log_probs=["-1", "-2"]), "response.log_probs: an array of dtype <U2"),
        (call(log_probs=[-1.0, None]), "response.log_probs: an array of dtype object"),
        (call(log_probs=[[-1.0], [-1.0, -2.0]]), "response.log_probs: list that makes no array"),
        (call(log_probs=[-1.0]), r"2 token ids and log_probs of shape \[1\]"),
        (call(log_probs=[-1e300, -1.0]), r"-1e\+300 at position 0"),
        (call(token_ids=[2, 2**31]), "response.token_ids: 2147483648 at position 1"),
        ({"final_reward": b"1"}, "final_reward b'1'"),
        ({"final_reward": 10**400}, "OverflowError"),
        ({"final_reward": [1.0]}, r"final_reward \[1.0\]"),
        ({"final_reward": 1j}, "final_reward 1j"),
        ({"final_reward": torch.zeros(2)}, "RuntimeError"),
        ({"rollout_id": None}, "rollout_id None"),
        ({"data_id": ["d"]}, r"data_id \['d'\]"),
        ({"data_id": True}, "data_id True"),
        ({"triplets": 5}, "triplets 5"),
        ({"triplets": "ab"}, "triplets 'ab'"),
        ({"triplets": [{"prompt": {"token_ids": None}, "response": {"token_ids": []}}]}, "prompt.token_ids"),
    ],
)  # fmt: skip
def test_values_of_another_kind(broken: dict[str, Any], text: str) -> None:
    with pytest.raises(SampleError, match=rf"CompletedRollout: item 1\n +got: +rollout 1: .*{text}"):
        read_completed_rollouts([rollout(), rollout() | broken])


@pytest.mark.parametrize("given", [None, 5, "ab", rollout()])
def test_what_is_no_list_of_rollouts(given: Any) -> None:
    with pytest.raises(SampleError, match="which is no list of them"):
        trace_rows(given)


def test_rewards_are_numbers_of_any_kind() -> None:
    rewards = [True, 2, np.float32(0.5), np.array([0.25]), torch.tensor(-1.0), math.inf]
    read = read_completed_rollouts([rollout(reward=r, rollout_id=n) for n, r in enumerate(rewards)])
    assert [(one.final_reward, type(one.final_reward)) for one in read] == [
        (value, float) for value in (1.0, 2.0, 0.5, 0.25, -1.0, math.inf)
    ]


def test_log_probs_may_be_above_zero_by_rounding() -> None:
    [row] = trace_rows([rollout() | call(log_probs=[1e-6, -0.0])]).samples
    assert row.rollout_log_probs.tolist() == [float(np.float32(1e-6)), 0.0]


def test_problems_of_all_rollouts_are_told() -> None:
    with pytest.raises(SampleError, match=r"rollout 0: TypeError.*'a'.*rollout 2: TypeError.*'b'"):
        read_completed_rollouts([rollout(reward="a"), rollout(), rollout(reward="b")])


@pytest.mark.parametrize("level", LEVELS)
def test_rollouts_with_the_ids_of_another_are_no_siblings(level: str) -> None:
    """They would be one rollout, whose rows have different rewards."""
    given = [rollout(([1], [2]), rollout_id=ids[1], data_id=ids[0]) for ids in ("ax", "ay", "ax", "bx", "by", "by")]
    with pytest.raises(SampleError, match="CompletedRollout: items 0, 2, 4, 5") as raised:
        trace_rows(given, level)
    assert raised.value.rows == (0, 2, 4, 5)
    assert raised.value.got == (
        "data_id 'a' and rollout_id 'x' on items 0, 2; data_id 'b' and rollout_id 'y' on items 4, 5"
    )
    # One id under two prompts is two rollouts, as everywhere.
    result = normalize_rewards(trace_rows([given[0], given[3]], level).samples)
    assert result.index.num_rollouts == 2


def test_unknown_level() -> None:
    with pytest.raises(ConfigError, match=r"got: +'turn'\n +expected: 'transition' or 'trajectory'"):
        trace_rows(ROLLOUTS, "turn")
    with pytest.raises(ConfigError, match="trace level"):
        trace_rows(ROLLOUTS, np.array(["transition", "trajectory"]))


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=3)), min_size=1, max_size=6))
def test_levels_train_the_same_tokens(drawn: list[tuple[int, list[int]]]) -> None:
    """Prompts that continue the context, repeat its beginning, or are new: each sampled token is trained once."""
    calls, context = [], [5]
    for kind, response in drawn:
        prompt = {0: [*context, 1], 1: context[:-1], 2: [*context], 3: [5]}[kind]
        calls.append((prompt, response))
        context = prompt + response
    by_call, merged = (trace_rows([rollout(*calls)], level).samples for level in LEVELS)

    def trained(rows: list[Any]) -> list[tuple[int, float]]:
        return [
            (int(token), float(value))
            for row in rows
            for token, mask, value in zip(
                row.tokens[len(row.tokens) - row.response_length :], row.loss_mask, row.rollout_log_probs, strict=True
            )
            if mask
        ]

    assert trained(by_call) == trained(merged)
    assert trained(by_call) == [(token, -float(token)) for _, response in calls for token in response]
    assert len(merged) <= len(by_call)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_advantages_do_not_depend_on_the_level(estimator: str) -> None:
    config = NormalizationConfig(advantage_estimator=estimator, missing_reward="exclude")
    results = [normalize_rewards(trace_rows(ROLLOUTS, level).samples, config) for level in LEVELS]
    assert torch.equal(results[0].rollout_advantages, results[1].rollout_advantages)
    assert [result.index.num_rollouts for result in results] == [8, 8]
    assert results[0].counted_rollouts.tolist() == [one["final_reward"] is not None for one in ROLLOUTS]
