"""What is read of a row: kinds of rewards and masks, and columns that exist already."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns, normalize_rewards
from miles_norm.errors import RewardError, SampleError
from miles_norm.result import NormalizedRewards

NAN = math.nan


def read(rows: list[dict[str, Any]], **settings: Any) -> NormalizedRewards:
    return normalize_rewards(rows, NormalizationConfig(**settings))


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
    result = read([new_row(index=0, reward=reward), new_row(index=1, reward=0)], advantage_estimator="dr_grpo")
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
        read([new_row(), new_row(reward=reward), new_row()])
    assert raised.value.rows == (1,)


def test_every_bad_reward_is_named() -> None:
    rows = [new_row(reward="x" if k % 2 else 1.0) for k in range(50)]
    with pytest.raises(
        RewardError, match=r"reward of rows 1, 3, 5, .*, 39 and 5 more\n.*row 19: the str 'x'; \.\.\.\n"
    ) as raised:
        read(rows)
    assert raised.value.rows == tuple(range(1, 50, 2))


def test_numeric_strings_on_request() -> None:
    rows = [new_row(index=0, reward="3"), new_row(index=1, reward="1e1"), new_row(index=2, reward=np.str_("-2.5"))]
    assert read(rows, coerce_numeric_strings=True).raw_rewards.tolist() == [3.0, 10.0, -2.5]
    with pytest.raises(RewardError, match=r"row 0: the str 'good', which is no number"):
        read([new_row(reward="good")], coerce_numeric_strings=True)
    with pytest.raises(RewardError, match=r"coerce_numeric_strings=True reads strings such as '0.5' as numbers"):
        read(rows)


def test_reward_key() -> None:
    rows = [new_row(index=k, reward={"score": score, "text": "no number"}) for k, score in enumerate((1.0, True, None))]
    result = read(rows, reward_key="score", missing_reward="exclude")
    assert result.raw_rewards.tolist() == pytest.approx([1.0, 1.0, NAN], nan_ok=True)
    mixed = [*rows, new_row(reward={"acc": 1.0}), new_row(reward=2.0), new_row(reward={"score": "1"})]
    text = (
        r"reward of rows 3, 4, 5\n +got: +row 3: a dict with the keys \['acc'\]; row 4: float 2.0, not a dict with the "
        r"key 'score'; row 5: the str '1'\n"
    )
    with pytest.raises(RewardError, match=text):
        read(mixed, reward_key="score", missing_reward="exclude")
    # A whole reward that is None is unscored with a key too.
    assert read([new_row(reward=None), rows[0]], reward_key="score", missing_reward="zero").raw_rewards[0].isnan()


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
    assert read([new_row(loss_mask=mask, response_length=9)]).trainable_tokens.tolist() == [3]


@pytest.mark.parametrize(
    "mask", [torch.ones(4097, dtype=torch.bfloat16), torch.ones(4097).half(), np.ones(4097, np.float16)]
)
def test_long_masks_of_narrow_types_are_counted_exactly(mask: Any) -> None:
    """4097 has no bfloat16 or float16; the next ones are 4096 and 4100."""
    assert read([new_row(loss_mask=mask)]).trainable_tokens.tolist() == [4097]


@pytest.mark.parametrize("times", [1, 63, 64, 300])
@pytest.mark.parametrize(
    "kind", [list, tuple, bytes, bytearray, np.array, torch.tensor, lambda mask: [*mask, 1.0][:-1]]
)
def test_masks_of_every_length(kind: Any, times: int) -> None:
    mask = [1, 0, 1, 1] * times
    assert read([new_row(loss_mask=kind(mask))]).trainable_tokens.tolist() == [3 * times]


@pytest.mark.parametrize("entry", [2, -1, 256, 0.5, None, "1", NAN, [1]])
@pytest.mark.parametrize("times", [0, 300])
def test_one_wrong_entry_in_a_mask(entry: Any, times: int) -> None:
    with pytest.raises(
        SampleError, match=r"trainable tokens of row 1\n +got: +row 1: loss_mask with entries other than"
    ):
        read([new_row(), new_row(loss_mask=[1, 0] * times + [entry] + [1] * times)])


@pytest.mark.parametrize("length", [3, np.int64(3), torch.tensor(3), 3.0])
def test_without_a_mask_all_tokens_are_trainable(length: Any) -> None:
    assert read([new_row(response_length=length)]).trainable_tokens.tolist() == [3]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_mask": [1, 2]}, r"row 1: loss_mask with entries other than 0 and 1, such as 2"),
        ({"loss_mask": [-1, 0]}, r"row 1: loss_mask with entries other than 0 and 1, such as -1"),
        ({"loss_mask": [0.5, 0.25]}, r"row 1: loss_mask with entries other than 0 and 1, such as 0.5"),
        ({"loss_mask": [math.nan]}, r"row 1: loss_mask with entries other than 0 and 1, such as nan"),
        ({"loss_mask": torch.ones(2, 2)}, r"row 1: loss_mask of shape \(2, 2\)"),
        ({"loss_mask": torch.tensor(1)}, r"row 1: loss_mask of shape \(\)"),
        ({"loss_mask": [[1], [0]]}, r"row 1: loss_mask with entries other than 0 and 1, such as \[1\]"),
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
        read([new_row(), new_row(**fields), new_row()])
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
