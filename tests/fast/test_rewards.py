"""Which reward speaks for a rollout, what is a reward, and how trainable tokens are counted."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns, normalize_rewards
from miles_norm.errors import DisagreeingRewardsError, MissingRewardError, RewardError, SampleError
from miles_norm.normalize import NormalizedRewards
from miles_norm.sample_columns import RolloutList

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
    assert tie.warnings == (
        "siblings of rollout 0 have different rewards; the one with the most trainable tokens speaks",
        "tie between siblings with different rewards in rollout 0: the first row speaks, so the result depends on the "
        "order of rows",
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
        r"siblings of rollouts 7, 8\n +got: +rollout 7: rows 2, 3 have rewards 1, 0.5; rollout 8: rows 4, 5 have rewards "
        r"0, 3\n +expected: one reward on all rows of a rollout \(rollout_reward is 'shared'\)"
    )
    with pytest.raises(DisagreeingRewardsError, match=text) as raised:
        spoken(rows, rollout_reward="shared")
    assert raised.value.rows == (2, 3, 4, 5)


def test_shared_tolerance_is_relative_to_the_largest() -> None:
    # 0.5 apart; 0.125 of 4 is 0.5.
    rows = rollout((-3.5, 1), (-4.0, 2))
    assert spoken(rows, rollout_reward="shared", shared_reward_tolerance=0.125).rollout_rewards.tolist() == [-4.0]
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


NUMBERS = [
    True,
    1,
    1.0,
    np.float16(1),
    np.int8(1),
    np.bool_(True),
    np.array(1.0),
    np.array([1.0]),
    torch.tensor(1.0, dtype=torch.bfloat16),
    torch.tensor(1.0, dtype=torch.float16),
    torch.tensor([[1]]),
    torch.tensor(True),
    torch.tensor(1.0, requires_grad=True),
    Decimal(1),
    Fraction(2, 2),
]


@pytest.mark.parametrize("reward", NUMBERS, ids=lambda value: f"{type(value).__name__} {value!r}")
def test_kinds_of_numbers(reward: Any) -> None:
    result = spoken([new_row(index=0, reward=reward), new_row(index=1, reward=0)], advantage_estimator="dr_grpo")
    assert result.raw_rewards.tolist() == [1.0, 0.0]
    assert result.advantages.tolist() == [0.5, -0.5]


NOT_NUMBERS = [
    ("0.5", r"row 1: the str '0.5'\n"),
    (b"0.5", r"row 1: bytes\n"),
    (bytearray(b"1"), r"row 1: bytearray\n"),
    ([1.0], r"row 1: list\n"),
    ((), r"row 1: tuple\n"),
    (1 + 2j, r"row 1: complex\n"),
    (np.complex64(1), r"row 1: complex\n"),
    (torch.tensor(1 + 0j), r"row 1: complex\n"),
    (torch.tensor([1.0, 2.0]), r"row 1: Tensor of shape \(2,\)\n"),
    (np.zeros((2, 1)), r"row 1: ndarray of shape \(2, 1\)\n"),
    (torch.zeros(0), r"row 1: Tensor of shape \(0,\)\n"),
    (np.str_("1"), r"row 1: the str '1'\n"),
    (object(), r"row 1: object\n"),
    ({"score": 1.0}, r"row 1: a dict with the keys \['score'\]\n(.*\n)*.*set reward_key .*\(keys seen: score\)"),
    (10**400, r"row 1: an integer beyond float64\n"),
    (1e39, r"got: +1e\+39\n +expected: a magnitude of at most 3.40282e\+38"),
    (-2e300, r"got: +-2e\+300\n"),
]


@pytest.mark.parametrize(("reward", "text"), NOT_NUMBERS, ids=[text for _, text in NOT_NUMBERS])
def test_what_is_no_reward(reward: Any, text: str) -> None:
    with pytest.raises(RewardError, match=rf"reward of row 1\n(.*\n)*.*{text}") as raised:
        spoken([new_row(), new_row(reward=reward), new_row()])
    assert raised.value.rows == (1,)


def test_every_bad_reward_is_named() -> None:
    rows = [new_row(reward="x" if k % 2 else 1.0) for k in range(50)]
    with pytest.raises(
        RewardError, match=r"reward of rows 1, 3, 5, .*, 39 and 5 more\n.*row 19: the str 'x'; \.\.\.\n"
    ) as raised:
        spoken(rows)
    assert raised.value.rows == tuple(range(1, 50, 2))


def test_numeric_strings_on_request() -> None:
    rows = [new_row(index=0, reward="3"), new_row(index=1, reward="1e1"), new_row(index=2, reward=np.str_("-2.5"))]
    assert spoken(rows, coerce_numeric_strings=True).raw_rewards.tolist() == [3.0, 10.0, -2.5]
    with pytest.raises(RewardError, match=r"row 0: the str 'good', which is no number"):
        spoken([new_row(reward="good")], coerce_numeric_strings=True)
    with pytest.raises(RewardError, match=r"coerce_numeric_strings=True reads strings such as '0.5' as numbers"):
        spoken(rows)


def test_reward_key() -> None:
    rows = [new_row(index=k, reward={"score": score, "text": "no number"}) for k, score in enumerate((1.0, True, None))]
    result = spoken(rows, reward_key="score", missing_reward="exclude")
    assert result.raw_rewards.tolist() == pytest.approx([1.0, 1.0, NAN], nan_ok=True)
    mixed = [*rows, new_row(reward={"acc": 1.0}), new_row(reward=2.0), new_row(reward={"score": "1"})]
    text = (
        r"reward of rows 3, 4, 5\n +got: +row 3: a dict with the keys \['acc'\]; row 4: float 2.0, not a dict with the key "
        r"'score'; row 5: the str '1'\n"
    )
    with pytest.raises(RewardError, match=text):
        spoken(mixed, reward_key="score", missing_reward="exclude")
    # A whole reward that is None is unscored with a key too.
    assert spoken([new_row(reward=None), rows[0]], reward_key="score", missing_reward="zero").raw_rewards[0].isnan()


def test_float32_limits() -> None:
    rows = [new_row(index=0, reward=FLOAT32_MAX), new_row(index=1, reward=-FLOAT32_MAX)]
    result = spoken(rows, advantage_estimator="dr_grpo")
    assert result.advantages.tolist() == [FLOAT32_MAX, -FLOAT32_MAX]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_no_advantage_is_infinite(estimator: str) -> None:
    """The distance of a large reward from a mean of the other sign does not fit float32, though the reward does."""
    rows = [new_row(index=k, reward=sign * FLOAT32_MAX) for k, sign in enumerate((1, -1, -1))]
    with pytest.raises(RewardError, match="(?s)row.*rescale the rewards"):
        spoken(rows, advantage_estimator=estimator, grpo_std_normalization=False)


def test_a_sum_beyond_float32() -> None:
    with pytest.raises(RewardError, match="rescale the rewards"):
        spoken(rollout((3e38, 1), (3e38, 1)), rollout_reward="sum", rewards_normalization=False)


MASK = [1, 0, 1, 1]
MASKS = [
    MASK,
    tuple(MASK),
    bytes(MASK),
    bytearray(MASK),
    [True, False, True, True],
    [1.0, 0.0, 1.0, 1.0],
    [np.int64(value) for value in MASK],
    [torch.tensor(value) for value in MASK],
    *(np.array(MASK, dtype=dtype) for dtype in (np.bool_, np.uint8, np.int64, np.float32)),
    *(torch.tensor(MASK, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16)),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{type(mask).__name__} {mask!r}"[:60])
def test_kinds_of_masks(mask: Any) -> None:
    assert spoken([new_row(loss_mask=mask, response_length=9)]).trainable_tokens.tolist() == [3]


@pytest.mark.parametrize(
    "mask", [torch.ones(4097, dtype=torch.bfloat16), torch.ones(4097).half(), np.ones(4097, np.float16)]
)
def test_long_masks_of_narrow_types_are_counted_exactly(mask: Any) -> None:
    """4097 has no bfloat16 or float16; the next ones are 4096 and 4100."""
    assert spoken([new_row(loss_mask=mask)]).trainable_tokens.tolist() == [4097]


@pytest.mark.parametrize("length", [3, np.int64(3), torch.tensor(3), 3.0])
def test_without_a_mask_all_tokens_are_trainable(length: Any) -> None:
    assert spoken([new_row(response_length=length)]).trainable_tokens.tolist() == [3]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_mask": [1, 2]}, r"row 1: a loss_mask that sums to 3"),
        ({"loss_mask": [-1, 0]}, r"row 1: a loss_mask that sums to -1"),
        ({"loss_mask": [0.5, 0.25]}, r"row 1: a loss_mask that sums to 0.75"),
        ({"loss_mask": [math.nan]}, r"row 1: a loss_mask that sums to nan"),
        ({"loss_mask": torch.ones(2, 2)}, r"row 1: loss_mask of shape \(2, 2\)"),
        ({"loss_mask": torch.tensor(1)}, r"row 1: loss_mask of shape \(\)"),
        ({"loss_mask": [[1], [0]]}, r"row 1: loss_mask .*int.*list"),
        ({"loss_mask": "11"}, r"row 1: loss_mask of type str"),
        ({"loss_mask": 1}, r"row 1: loss_mask of type int"),
        ({"response_length": None}, r"row 1: neither loss_mask nor response_length"),
        ({"response_length": -1}, r"row 1: response_length -1"),
        ({"response_length": 1.5}, r"row 1: response_length 1.5"),
        ({"response_length": True}, r"row 1: response_length True"),
        ({"response_length": "3"}, r"row 1: response_length '3'"),
        ({"response_length": torch.tensor([1, 2])}, r"row 1: response_length tensor\(\[1, 2\]\)"),
    ],
)
def test_what_is_no_mask(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SampleError, match=rf"trainable tokens of row 1\n +got: +{text}") as raised:
        spoken([new_row(), new_row(**fields), new_row()])
    assert raised.value.rows == (1,)


def columns(**changed: Any) -> RolloutColumns:
    good: dict[str, Any] = {"group": [0, 0], "rollout": [0, 1], "reward": [1.0, 0.0], "trainable_tokens": [2, 3]}
    return RolloutColumns(**good | changed)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"reward": [[1.0], [0.0]]}, RewardError, r"reward column\n +got: +shape \(2, 1\)"),
        ({"reward": ["1", "0"]}, RewardError, r"reward column\n"),
        ({"reward": np.array(["1", "0"])}, RewardError, r"reward column\n"),
        ({"reward": [1.0, {"score": 1}]}, RewardError, r"use normalize_rewards\(samples, \.\.\.\)"),
        ({"reward": [1j, 0]}, RewardError, r"reward column\n"),
        ({"reward": np.array([1j, 0])}, RewardError, r"reward column\n"),
        ({"reward": torch.tensor([1j, 0])}, RewardError, r"dtype torch.complex64"),
        ({"reward": []}, SampleError, r"reward\n +got: +no rows"),
        ({"group": [0]}, SampleError, r"group column\n +got: +shape \[1\]\n +expected: \[2\]"),
        ({"rollout": torch.zeros(2, 1)}, SampleError, r"rollout column\n +got: +shape \[2, 1\]"),
        ({"adapter": ["x"]}, SampleError, r"adapter column\n"),
        ({"trainable_tokens": [1, 2, 3]}, SampleError, r"trainable_tokens column\n"),
        ({"trainable_tokens": [1, -2]}, SampleError, r"trainable_tokens of row 1\n +got: +-2"),
        ({"trainable_tokens": [1.5, 2]}, SampleError, r"trainable_tokens of row 0\n +got: +1.5"),
        ({"trainable_tokens": [NAN, 2]}, SampleError, r"trainable_tokens of row 0\n +got: +nan"),
        ({"trainable_tokens": [True, False]}, SampleError, r"trainable_tokens\n +got: +dtype torch.bool"),
        ({"trainable_tokens": [1, 2**31]}, SampleError, r"trainable_tokens of row 1\n +got: +2147483648"),
        ({"trainable_tokens": ["1", "2"]}, SampleError, r"trainable_tokens"),
        ({"removed": [2, 0]}, SampleError, r"removed\n +got: +dtype torch.int64 with values other than 0 and 1"),
        ({"padding": [True]}, SampleError, r"padding column\n"),
        ({"scored": [None, True]}, SampleError, r"scored"),
    ],
)  # fmt: skip
def test_bad_columns(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        columns(**changed)


def test_optional_columns() -> None:
    full = columns(
        scored=torch.tensor([True, True]), removed=[False, True], truncated=[0, 0], padding=np.array([False, False])
    )
    result = normalize_columns(full, NormalizationConfig(advantage_estimator="dr_grpo"))
    assert result.advantages.tolist() == [0.5, -0.5]
    assert result.trainable_tokens.tolist() == [2, 0]
    assert repr(full) == (
        "RolloutColumns(2 rows on cpu: group, rollout, reward, trainable_tokens, scored, removed, truncated, padding)"
    )
    unscored = normalize_columns(columns(scored=[True, False]), NormalizationConfig(missing_reward="exclude"))
    assert unscored.raw_rewards.tolist() == pytest.approx([1.0, NAN], nan_ok=True)
    assert unscored.counted_rollouts.tolist() == [True, False]


def test_columns_of_none_are_unscored() -> None:
    found = normalize_columns(columns(reward=[1.0, None]), NormalizationConfig(missing_reward="exclude"))
    assert found.counted_rollouts.tolist() == [True, False]


@pytest.mark.parametrize("view", [lambda array: array[::-1], lambda array: array[::-1].copy().astype(">i8")])
def test_arrays_that_torch_cannot_share(view: Any) -> None:
    """Reversed, of the other byte order, and read-only, as arrays from a shared-memory store are."""
    arrays = {"group": [0, 0, 1], "rollout": [0, 1, 2], "reward": [1, 0, 5], "trainable_tokens": [2, 3, 4]}
    given = {name: view(np.array(column)) for name, column in arrays.items()}
    for array in given.values():
        array.flags.writeable = False
    result = normalize_columns(RolloutColumns(**given), NormalizationConfig(advantage_estimator="dr_grpo"))
    assert result.advantages.tolist() == [0.0, -0.5, 0.5]
    assert result.trainable_tokens.tolist() == [4, 3, 2]
