"""Which reward speaks for a rollout: every policy, rows without a reward, and padding."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.columns.sample_columns import RolloutList
from miles_norm.errors import DisagreeingRewardsError, MissingRewardError, RewardError
from miles_norm.result import NormalizedRewards

NAN = math.nan
FLOAT32_MAX = float(torch.finfo(torch.float32).max)


def rollout(*siblings: tuple[Any, int], **same: Any) -> list[dict[str, Any]]:
    """One rollout, from (reward, trainable tokens) of its rows."""
    return [new_row(index=0, reward=reward, response_length=tokens, **same) for reward, tokens in siblings]


def spoken(rows: list[dict[str, Any]], **settings: Any) -> NormalizedRewards:
    return normalize_rewards(rows, NormalizationConfig(**settings))


# Rewards 1, 4, 2, 4 with 3, 5, 5, 1 tokens: row 1 is the first of the two longest.
SIBLINGS = rollout((1.0, 3), (4.0, 5), (2.0, 5), (4.0, 1))


@pytest.mark.parametrize(
    ("policy", "reward"),
    # The sum is 11, the mean 11 / 4.
    [("mainstream", 4.0), ("first", 1.0), ("last", 4.0), ("max", 4.0), ("mean", 2.75), ("sum", 11.0)],
)
def test_policies(policy: str, reward: float) -> None:
    other = new_row(index=1, reward=-1.0)
    result = spoken([*SIBLINGS, other], rollout_reward=policy, advantage_estimator="dr_grpo")
    assert result.rollout_rewards.tolist() == [reward, -1.0]
    # Two rewards: half their distance.
    assert result.advantages.tolist() == [(reward + 1) / 2] * 4 + [-(reward + 1) / 2]
    assert result.mainstream_rows.tolist() == [1, 4]
    assert result.raw_rewards.tolist() == [1.0, 4.0, 2.0, 4.0, -1.0]


@pytest.mark.parametrize("policy", ["mainstream", "first", "last", "max", "mean", "sum"])
def test_rollouts_of_one_row(policy: str) -> None:
    rows = [new_row(index=k, reward=reward) for k, reward in enumerate((3.0, -2.0, 0.5))]
    assert spoken(rows, rollout_reward=policy).rollout_rewards.tolist() == [3.0, -2.0, 0.5]


def test_max_of_negative_rewards() -> None:
    assert spoken(rollout((-3.0, 1), (-1.0, 1)), rollout_reward="max").rollout_rewards.tolist() == [-1.0]


@pytest.mark.parametrize("value", [0.1, 0.7, -1 / 3])
def test_mean_of_equal_siblings_is_that_value(value: float) -> None:
    """Ten times 0.1, added up and divided, is not 0.1."""
    assert spoken(rollout(*[(value, 1)] * 10), rollout_reward="mean").rollout_rewards.tolist() == [value]


def test_disagreement_and_tie_are_warnings() -> None:
    longest = spoken(rollout((1.0, 2), (4.0, 5)))
    assert longest.warnings == (
        "siblings of rollout 0 have different rewards; the one with the most trainable tokens speaks",
    )  # fmt: skip
    tie = spoken(rollout((1.0, 5), (4.0, 5)))
    assert tie.rollout_rewards.tolist() == [1.0]
    assert tie.warnings[:1] == longest.warnings
    [warning] = tie.warnings[1:]
    assert warning == (
        "tie between siblings with different rewards in rollout 0: the first row speaks, so the result depends on the "
        "order of rows"
    )
    assert spoken(rollout((4.0, 5), (4.0, 5))).warnings == ()
    assert spoken(rollout((1.0, 5), (4.0, 5)), rollout_reward="max").warnings == ()


def test_rollouts_that_were_lists_are_named_by_their_list() -> None:
    rows = [new_row(index=None, reward=0.0), new_row(index=None, reward=1.0, response_length=2)]
    result = spoken([[new_row(index=None), rows]])
    assert result.warnings[0].startswith("siblings of rollout <list 0> have different rewards")
    assert result.index.rollout_ids == [None, RolloutList(0)]


def test_a_removed_row_speaks_only_for_want_of_another() -> None:
    rows = rollout((9.0, 8), (4.0, 1))
    rows[0]["remove_sample"] = True
    result = spoken(rows)
    assert result.rollout_rewards.tolist() == [4.0]
    assert result.trainable_tokens.tolist() == [0, 1]
    rows[1]["remove_sample"] = True
    assert spoken(rows).mainstream_rows.tolist() == [0]


def test_truncation_takes_no_tokens_before_the_choice() -> None:
    rows = rollout((9.0, 8), (4.0, 1))
    rows[0]["status"] = "truncated"
    result = spoken([*rows, new_row(index=1, reward=0.0)], truncated_rollouts="untrain", advantage_estimator="dr_grpo")
    assert result.rollout_rewards.tolist() == [9.0, 0.0]
    assert result.advantages.tolist() == [4.5, 4.5, -4.5]
    assert result.trainable_tokens.tolist() == [0, 0, 1]
    assert result.counted_rollouts.tolist() == [True, True]


def test_shared() -> None:
    agreeing = rollout((2.0, 3), (2.0, 5))
    assert spoken(agreeing, rollout_reward="shared").rollout_rewards.tolist() == [2.0]
    rows = [*agreeing, *(new_row(index=k, reward=reward) for k, reward in ((7, 1.0), (7, 0.5), (8, 0.0), (8, 3.0)))]
    text = (
        r"siblings of rollouts 7, 8\n +got: +rollout 7: rows 2, 3 have rewards 1, 0.5; rollout 8: rows 4, 5 have "
        r"rewards 0, 3\n +expected: one reward on all rows of a rollout \(rollout_reward is 'shared'\)"
    )
    with pytest.raises(DisagreeingRewardsError, match=text) as raised:
        spoken(rows, rollout_reward="shared")
    assert raised.value.rows == (2, 3, 4, 5)


def test_shared_tolerance_is_relative_to_the_largest() -> None:
    # 0.5 apart; 0.125 of 4 is 0.5. The larger one speaks, whichever has more tokens.
    rows = rollout((-3.5, 1), (-4.0, 2))
    assert spoken(rows, rollout_reward="shared", shared_reward_tolerance=0.125).rollout_rewards.tolist() == [-3.5]
    with pytest.raises(DisagreeingRewardsError, match=r"within 0\.12 of the largest"):
        spoken(rows, rollout_reward="shared", shared_reward_tolerance=0.12)


UNSCORED = [None, NAN, math.inf, -math.inf, np.float32("nan"), torch.tensor(NAN), Decimal("NaN")]


@pytest.mark.parametrize("reward", UNSCORED)
def test_unscored_rows_are_an_error_by_default(reward: Any) -> None:
    rows = [new_row(index=0), new_row(index=1, reward=reward, status="ABORTED"), new_row(index=2, reward=None)]
    text = r"reward of rows 1, 2\n +got: +row 1: (None|nan|inf|-inf), status aborted; row 2: None, status completed\n"
    with pytest.raises(MissingRewardError, match=text) as raised:
        spoken(rows)
    assert raised.value.rows == (1, 2)
    excluded = spoken(rows, missing_reward="exclude")
    assert excluded.counted_rollouts.tolist() == [True, False, False]
    zero = spoken(rows, missing_reward="zero")
    assert zero.rollout_rewards.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "excluded", "zero"),
    # Rewards None, 4, 2, None with 9, 1, 3, 1 tokens. Scored rows: 1 and 2. With zeros: 0, 4, 2, 0.
    [
        ("mainstream", 2.0, 0.0),
        ("first", 4.0, 0.0),
        ("last", 2.0, 0.0),
        ("max", 4.0, 4.0),
        ("mean", NAN, 1.5),
        ("sum", NAN, 6.0),
    ],
)
def test_missing_policies(policy: str, excluded: float, zero: float) -> None:
    rows = rollout((None, 9), (4.0, 1), (2.0, 3), (NAN, 1))
    result = spoken(rows, rollout_reward=policy, missing_reward="exclude")
    assert result.rollout_rewards.tolist() == pytest.approx([excluded], nan_ok=True)
    assert result.counted_rollouts.tolist() == [not math.isnan(excluded)]
    assert result.mainstream_rows.tolist() == [2]
    assert spoken(rows, rollout_reward=policy, missing_reward="zero").rollout_rewards.tolist() == [zero]
    assert result.raw_rewards.tolist() == pytest.approx([NAN, 4.0, 2.0, NAN], nan_ok=True)


def test_missing_under_shared() -> None:
    """Rows without a reward have nothing to disagree with; as zeros they have."""
    rows = rollout((None, 9), (4.0, 1), (4.0, 3))
    result = spoken(rows, rollout_reward="shared", missing_reward="exclude")
    assert result.rollout_rewards.tolist() == [4.0]
    with pytest.raises(DisagreeingRewardsError, match="rows 0, 1, 2 have rewards 0, 4, 4"):
        spoken(rows, rollout_reward="shared", missing_reward="zero")


@pytest.mark.parametrize("policy", ["mainstream", "shared", "first", "last", "max", "mean", "sum"])
def test_a_rollout_without_a_reward_is_unscored(policy: str) -> None:
    rows = [*rollout((None, 3), (NAN, 2)), new_row(index=1, reward=5.0), new_row(index=2, reward=1.0)]
    result = spoken(rows, rollout_reward=policy, missing_reward="exclude", advantage_estimator="dr_grpo")
    assert result.rollout_rewards.tolist() == pytest.approx([NAN, 5.0, 1.0], nan_ok=True)
    assert result.advantages.tolist() == [0.0, 0.0, 2.0, -2.0]
    assert result.trained_rows.tolist() == [False, False, True, True]


def test_no_rollout_counts() -> None:
    result = spoken(rollout((None, 3)), missing_reward="exclude")
    assert result.warnings == ("no rollout counts: all advantages are 0",)
    assert result.advantages.tolist() == [0.0]
    assert result.metrics()["miles_norm/counted_rollouts"] == 0


@pytest.mark.parametrize("policy", ["mainstream", "shared", "first", "last", "max", "mean", "sum"])
def test_padding_never_speaks(policy: str) -> None:
    """First, last, longest and largest, scored or not, it shows the advantage of its rollout and enters nothing."""
    rows = [
        new_row(index=0, reward=99.0, response_length=50, is_padding=True),
        new_row(index=0, reward=4.0),
        new_row(index=1, reward=0.0),
        new_row(index=0, reward=None, response_length=50, is_padding=True),
        new_row(index=5, reward=99.0, is_padding=True),
    ]
    result = spoken(rows, rollout_reward=policy, advantage_estimator="dr_grpo")
    assert result.rollout_rewards.tolist() == pytest.approx([4.0, 0.0, NAN], nan_ok=True)
    assert result.advantages.tolist() == [2.0, 2.0, -2.0, 2.0, 0.0]
    assert result.trainable_tokens.tolist() == [0, 1, 1, 0, 0]
    assert result.counted_rollouts.tolist() == [True, True, False]
    assert result.mainstream_rows.tolist()[:2] == [1, 2]
    assert result.warnings == ()
    assert result.statistics.count.tolist() == [2]
    metrics = result.metrics()
    assert metrics["miles_norm/fan_out_mean"] == 1.0
    assert metrics["miles_norm/row_reward_mean"] == 2.0


def test_padding_where_rows_keep_their_rewards() -> None:
    rows = [new_row(index=0, reward=4.0), new_row(index=0, reward=7.0, is_padding=True)]
    assert spoken(rows, rewards_normalization=False).advantages.tolist() == [4.0, 4.0]


def test_float32_limits() -> None:
    rows = [new_row(index=0, reward=FLOAT32_MAX), new_row(index=1, reward=-FLOAT32_MAX)]
    result = spoken(rows, advantage_estimator="dr_grpo")
    assert result.advantages.tolist() == [FLOAT32_MAX, -FLOAT32_MAX]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_no_advantage_is_infinite(estimator: str) -> None:
    """The distance of a large reward from a mean of the other sign does not fit float32, though the reward does."""
    rows = [new_row(index=k, reward=sign * FLOAT32_MAX) for k, sign in enumerate((1, -1, -1))]
    with pytest.raises(RewardError, match=r"(?s)advantage of row 0\n.*rescale the rewards"):
        spoken(rows, advantage_estimator=estimator, grpo_std_normalization=False)


def test_a_sum_beyond_float32() -> None:
    with pytest.raises(RewardError, match="rescale the rewards"):
        spoken(rollout((3e38, 1), (3e38, 1)), rollout_reward="sum", rewards_normalization=False)
