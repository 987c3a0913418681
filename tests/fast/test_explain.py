"""What ``explain`` says of a row: whole texts of typical rows, and every reason why a rollout does not count."""

import math
from typing import Any

import pytest
from batches import new_row

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.counting import Exclusion


def explained(rows: list[Any], row: int, sizes: list[int] | None = None, **settings: Any) -> str:
    return normalize_rewards(rows, NormalizationConfig(**settings), sizes).explain(row)


# Rollout rewards 4, 0, 2: mean 2, std 2; the others' means are 1, 3, 2.
ROWS = [
    new_row(group_index="p", rollout_id=7, reward=4.0, response_length=3),
    new_row(group_index="p", rollout_id=7, reward=4.0, response_length=5),
    new_row(group_index="p", rollout_id=8, reward=0.0, response_length=1),
    new_row(group_index="p", rollout_id=9, reward=2.0, response_length=2),
]


def test_a_row_of_a_fanned_out_rollout() -> None:
    assert explained(ROWS, 0, advantage_estimator="rloo") == (
        "row 0: advantage 3\n"
        "  group       0 (from group_index = 'p'): 3 rollouts, 3 of them in the statistics\n"
        "  rollout     7: rows 0, 1 (fan-out 2)\n"
        "  reward      4: row 1 speaks, with the most trainable tokens (row 0: 4, 3 tokens; row 1: 4, 5 tokens)\n"
        "  statistics  n 3, mean 2, std 2 (ddof 1) of the rollout rewards 0, 2, 4\n"
        "  arithmetic  rloo: (4 - 2) * 3 / (3 - 1) = 3\n"
        "  training    3 trainable tokens carry it"
    )


def test_a_row_that_does_not_count() -> None:
    rows = [*ROWS[:3], new_row(group_index="p", reward=None, status="aborted")]
    assert explained(rows, 3, missing_reward="exclude") == (
        "row 3: advantage 0\n"
        "  group       0 (from group_index = 'p'): 3 rollouts, 2 of them in the statistics\n"
        "  rollout     without an id: row 3 (fan-out 1)\n"
        "  reward      none: the only row has it\n"
        # Rewards 4 and 0: mean 2, std sqrt(8).
        "  statistics  n 2, mean 2, std 2.828427 (ddof 1) of the rollout rewards 0, 4\n"
        "  arithmetic  0: the rollout does not count, since no row that may speak has a reward (missing_reward is "
        "'exclude')\n"
        "  training    none of its tokens is trained: it is excluded"
    )


def test_a_row_whose_group_was_guessed() -> None:
    rows = [new_row(group_index=None, index=0, reward=1.0), new_row(group_index=None, index=1, reward=1.0)]
    rows.append(new_row(group_index=None, index=2, reward=1.0, remove_sample=True))
    assert explained(rows, 2) == (
        "row 2: advantage 0\n"
        "  group       0 (from a guess: all rows in one group): 3 rollouts, 3 of them in the statistics\n"
        "  rollout     2: row 2 (fan-out 1)\n"
        "  reward      1: the only row has it\n"
        "  statistics  n 3, mean 1, std 0 (ddof 1) of the rollout rewards 1, 1, 1\n"
        "  arithmetic  0: all rewards of the group are equal\n"
        "  training    none of its tokens is trained: remove_sample is set"
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        # 2 / (2 + 1e-6), in float32
        ({}, "arithmetic  grpo: (4 - 2) / (2 + 1e-06) = 0.9999995"),
        ({"advantage_estimator": "gspo", "std_epsilon": 2.0}, "arithmetic  gspo: (4 - 2) / (2 + 2) = 0.5"),
        ({"grpo_std_normalization": False}, "arithmetic  grpo: 4 - 2 = 2"),
        ({"advantage_estimator": "dr_grpo"}, "arithmetic  dr_grpo: 4 - 2 = 2"),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline"},
            "arithmetic  reinforce_plus_plus_baseline: 4 - 2 = 2",
        ),
        ({"advantage_estimator": "ppo"}, "arithmetic  4: rows keep their own rewards (ppo)"),
        ({"rewards_normalization": False}, "4: rows keep their own rewards (rewards_normalization is false)"),
        ({"rollout_reward": "shared"}, "reward      4: all siblings share it (row 0"),
        ({"rollout_reward": "first"}, "reward      4: the first sibling that may speak has it (row 0"),
        ({"rollout_reward": "last"}, "reward      4: the last sibling that may speak has it (row 0"),
        ({"rollout_reward": "max"}, "reward      4: max of the siblings (row 0"),
        ({"rollout_reward": "mean"}, "reward      4: mean of the siblings (row 0"),
        ({"rollout_reward": "sum"}, "reward      8: sum of the siblings (row 0"),
        ({"zero_std_tolerance": 0.999}, "(ddof 1)"),
        ({"std_ddof": 0}, "mean 2, std 1.632993 (ddof 0)"),  # sqrt(8 / 3)
    ],
)
def test_reward_and_arithmetic(settings: dict[str, Any], text: str) -> None:
    assert text in explained(ROWS, 0, **settings)


def test_equal_within_the_tolerance() -> None:
    rows = [new_row(index=0, reward=4.0), new_row(index=1, reward=3.0)]
    text = "arithmetic  0: all rewards of the group are equal, within zero_std_tolerance 0.25"
    assert text in explained(rows, 0, zero_std_tolerance=0.25)


@pytest.mark.parametrize(("singleton", "advantage"), [("zero", 0), ("raw", 3)])
def test_a_group_of_one(singleton: str, advantage: int) -> None:
    text = explained([new_row(reward=3.0)], 0, singleton=singleton)
    assert f"arithmetic  {advantage}: a group of one has no baseline (singleton is '{singleton}')" in text


@pytest.mark.parametrize(
    ("rows", "sizes", "settings", "text"),
    [
        (ROWS, [4], {}, "0 (from the sizes that were passed in)"),
        ([ROWS], None, {}, "0 (from the nesting of the input)"),
        (
            [row | {"group_index": None} for row in ROWS],
            None,
            {"n_samples_per_prompt": 2, "rollout_batch_size": 2},
            "0 (from a guess: contiguous groups of n_samples_per_prompt rows)",
        ),
        ([row | {"adapter": "x"} for row in ROWS], None, {}, "0 (from (adapter, group_index) = ('x', 'p'))"),
        ([row | {"group_index": (1, 2)} for row in ROWS], None, {}, "0 (from group_index = (1, 2))"),
        ([row | {"task": "t"} for row in ROWS], None, {"group_key": "task"}, "0 (from task = 't')"),
    ],
)
def test_how_the_group_was_formed(rows: list[Any], sizes: Any, settings: dict[str, Any], text: str) -> None:
    assert text in explained(rows, 0, sizes, **settings)


PAIR = [new_row(index=0, reward=1.0), new_row(index=1, reward=0.0)]
EXCLUDED = {
    Exclusion.PADDING: ([*PAIR, new_row(index=2, is_padding=True)], {}, "all its rows are padding"),
    Exclusion.UNSCORED: ([*PAIR, new_row(index=2, reward=math.nan)], {"missing_reward": "exclude"}, "no row that may"),
    Exclusion.UNTRAINED: (
        [*PAIR, new_row(index=2, response_length=0)],
        {"untrained_rollouts": "exclude"},
        "it has no trainable token (untrained_rollouts is 'exclude')",
    ),
    Exclusion.SMALL_GROUP: (
        [*PAIR, new_row(group_index=1, index=2)],
        {"min_group_size": 2},
        "its group has fewer counted rollouts than min_group_size",
    ),
    Exclusion.ZERO_VARIANCE: (
        [*PAIR, new_row(group_index=1, index=2), new_row(group_index=1, index=3)],
        {"zero_variance_groups": "drop_from_loss"},
        "all rewards of its group are equal, and such groups are dropped from the loss",
    ),
}


def test_every_exclusion_is_covered() -> None:
    by_filters = {Exclusion.TRUNCATED, Exclusion.UNSCORED_GROUP, Exclusion.INCOMPLETE_GROUP}  # test_filters.py
    assert set(EXCLUDED) == set(Exclusion) - {Exclusion.COUNTED} - by_filters


@pytest.mark.parametrize("reason", EXCLUDED, ids=lambda reason: reason.name)
def test_reasons_for_exclusion(reason: Exclusion) -> None:
    rows, settings, text = EXCLUDED[reason]
    result = normalize_rewards(rows, NormalizationConfig(**settings))
    assert result.exclusion is not None
    assert result.exclusion.tolist() == [0, 0] + [reason] * (len(rows) - 2)
    assert result.advantages[2:].tolist() == [0.0] * (len(rows) - 2)
    assert result.trainable_tokens.tolist() == [1, 1] + [0] * (len(rows) - 2)
    assert f"arithmetic  0: the rollout does not count, since {text}" in result.explain(2)
    assert "does not count" not in result.explain(0)


@pytest.mark.parametrize(
    ("fields", "settings", "text"),
    [
        ({"response_length": 1}, {}, "1 trainable token carries it"),
        ({"response_length": 2}, {}, "2 trainable tokens carry it"),
        ({"loss_mask": [0, 0]}, {}, "none of its tokens is trained: it has no trainable token"),
        ({"is_padding": True}, {}, "none of its tokens is trained: it is padding"),
        ({"remove_sample": True}, {}, "none of its tokens is trained: remove_sample is set"),
        (
            {"status": "truncated"},
            {"truncated_rollouts": "untrain"},
            "none of its tokens is trained: the rollout was truncated (truncated_rollouts is 'untrain')",
        ),
        ({"status": "truncated"}, {}, "1 trainable token carries it"),
    ],
)
def test_training(fields: dict[str, Any], settings: dict[str, Any], text: str) -> None:
    assert explained([*PAIR, new_row(index=0, **fields)], 2, **settings).endswith(f"training    {text}")


def test_statistics_hold_what_was_dropped_for_zero_variance() -> None:
    rows, settings, _ = EXCLUDED[Exclusion.ZERO_VARIANCE]
    assert "n 2, mean 1, std 0 (ddof 1) of the rollout rewards 1, 1\n" in explained(rows, 2, **settings)


def test_statistics_of_a_group_where_none_counts() -> None:
    assert "statistics  none: no rollout of the group counts" in explained([new_row(is_padding=True)], 0)


def test_long_lists_are_cut() -> None:
    rows = [new_row(index=0, reward=0.5) for _ in range(20)] + [new_row(index=k, reward=k) for k in range(1, 30)]
    text = explained(rows, 0)
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 8 more (fan-out 20)" in text
    assert "of the rollout rewards 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 18 more" in text


@pytest.mark.parametrize("row", [-1, 2, True, 0.0, "0", None])
def test_no_such_row(row: Any) -> None:
    with pytest.raises(IndexError, match=r"expected: a row number from 0 to 1"):
        normalize_rewards(PAIR).explain(row)


@pytest.mark.parametrize("options", [{}, {"whitening": "rollout"}, {"whitening": "token", "whitening_shift": True}])
def test_the_baseline_of_opo_is_that_of_the_group(options: dict[str, Any]) -> None:
    """Rewards 1 and 0 of 30 and 10 tokens: baseline 30/40. Group 1 gives the batch another mean."""
    lengths = ((0, 1.0, 30), (0, 0.0, 10), (1, 4.0, 5), (1, 0.0, 5))
    rows = [
        new_row(group_index=group, index=k, reward=reward, response_length=length)
        for k, (group, reward, length) in enumerate(lengths)
    ]
    assert "1 - 0.75" in explained(rows, 0, advantage_estimator="opo", options=options)
