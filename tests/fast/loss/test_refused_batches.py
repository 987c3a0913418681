"""Masks, counts, ids, lengths, results and plans that are refused, and every form in which they may come."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from miles_norm import RolloutColumns, UpdateConfig, loss_weights, normalize_columns, plan_updates
from miles_norm.errors import SampleError
from miles_norm.loss import mask_loss_weights, rollout_sequences, scale_advantages, update_masses

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
# Rollouts "a" on rows 0 and 1, "b" and "c" on one row each.
RESULT = normalize_columns(
    RolloutColumns(group=[0] * 4, rollout=["a", "a", "b", "c"], reward=[1, 1, 0, 1], trainable_tokens=[2, 1, 2, 1])
)
PLAN = plan_updates(RESULT, UpdateConfig(rollouts_per_update=2, max_tokens_per_gpu=9))


def some_masks() -> Iterator[list[int]]:
    yield [1, 0]
    yield [1, 1]


@pytest.mark.parametrize(
    ("masks", "match"),
    [
        (None, r"^loss masks\n +got: +a value of type NoneType"),
        (5, r"^loss masks\n +got: +a value of type int"),
        ({0: [1]}, r"^loss masks\n +got: +a value of type dict"),
        ({1, 0}, r"^loss masks\n +got: +a value of type set"),
        ("10", r"^loss masks\n +got: +a value of type str"),
        (b"\x01\x00", r"^loss masks\n +got: +a value of type bytes"),
        (some_masks(), r"^loss masks\n +got: +a value of type generator"),
        (torch.tensor(3), r"^loss masks\n +got: +torch.int64 of shape \[\]"),
        (np.array(3), r"^loss masks\n +got: +torch.int64 of shape \[\]"),
        (torch.ones(2, 2, 2), r"^loss masks\n +got: +torch.float32 of shape \[2, 2, 2\]"),
        (
            torch.ones(2, 2).to_sparse(),
            r"^loss masks\n +got: +torch.float32 of shape \[2, 2\] on cpu, torch.sparse_coo",
        ),
        ([], r"^loss masks\n +got: +no rows"),
        (torch.zeros(0, 3), r"^loss masks\n +got: +no rows"),
        ([2**63, 2], r"^loss mask of row 0\n +got: +9223372036854775808\n.*to 2\*\*31 - 1"),
        ([2, 2**31], r"^loss mask of row 1\n +got: +2147483648\n"),
        ([True, False], r"^loss mask of rows 0, 1\n +got: +a mask of type bool"),
        ([2, -1], r"^loss mask of row 1\n +got: +-1\n"),
        ([2, [1]], r"^loss mask of row 0\n +got: +a mask of type int"),
        ([2.0, 3.0], r"^loss mask of rows 0, 1\n +got: +a mask of type float"),
        (torch.tensor([True, False]), r"^trainable_tokens\n +got: +dtype torch.bool"),
        (torch.tensor([2, -1]), r"^trainable_tokens of row 1\n"),
        (torch.tensor([[1, 0], [math.nan, 1]]), r"^loss mask of row 1\n.*entries other than 0 and 1"),
        (np.array(["a", "b"]), r"^loss mask of rows 0, 1\n +got: +a mask of type str"),
    ],
)
def test_masks_and_counts_that_are_none(masks: Any, match: str) -> None:
    with pytest.raises(SampleError, match=match):
        mask_loss_weights(masks, [0, 1])


@pytest.mark.parametrize(
    "counts", [[2, 1], (2, 1), range(2, 0, -1), np.array([2, 1]), [np.int64(2), np.int64(1)], torch.tensor([2.0, 1.0])]
)
def test_counts_in_every_form(counts: Any) -> None:
    assert mask_loss_weights(counts, [0, 1]).tolist() == [1 / 4, 1 / 2]


def test_masks_as_an_array_of_lists() -> None:
    masks = np.empty(2, dtype=object)
    masks[:] = [[1, 0, 1], [1]]
    assert mask_loss_weights(masks, [0, 1]).tolist() == [1 / 4, 1 / 2]


@pytest.mark.parametrize("ids", [5, {0: 1, 1: 2}, "01", (n for n in (0, 1))])
def test_ids_that_are_no_column(ids: Any) -> None:
    with pytest.raises(SampleError, match=r"^rollout column\n +got: +a value of type"):
        mask_loss_weights([2, 1], ids)
    with pytest.raises(SampleError, match=r"^group column\n +got: +a value of type"):
        mask_loss_weights([2, 1], [0, 1], group=ids)


@pytest.mark.parametrize(
    "other", [None, {}, PLAN, RESULT.index, RESULT.columns, torch.ones(4)], ids=lambda x: type(x).__name__
)
def test_results_that_are_none(other: Any) -> None:
    for call in (
        lambda: loss_weights(other),
        lambda: plan_updates(other),
        lambda: rollout_sequences(other, [0]),
    ):
        with pytest.raises(SampleError, match=r"^result\n.*\n +expected: a value of type NormalizedRewards"):
            call()


@pytest.mark.parametrize("other", [{}, RESULT, UpdateConfig(), [[0, 1], [2, 3]]], ids=lambda x: type(x).__name__)
def test_plans_that_are_none(other: Any) -> None:
    with pytest.raises(SampleError, match=r"^plan\n.*\n +expected: a value of type UpdatePlan"):
        loss_weights(RESULT, None, other)
    with pytest.raises(SampleError, match=r"^plan\n.*\n +expected: a value of type UpdatePlan"):
        update_masses(other)


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        (None, r"^lengths\n +got: +a value of type NoneType"),
        (5, r"^lengths\n +got: +a value of type int"),
        ({0: 5, 1: 5, 2: 5, 3: 5}, r"^lengths\n +got: +a value of type dict"),
        ({1, 2, 3, 4}, r"^lengths\n +got: +a value of type set"),
        ("1234", r"^lengths\n +got: +a value of type str"),
        (b"1234", r"^lengths\n +got: +a value of type bytes"),
        ((n for n in range(4)), r"^lengths\n +got: +a value of type generator"),
        (torch.tensor(4), r"^lengths\n +got: +torch.int64 of shape \[\]"),
        (torch.ones(4, 2, dtype=torch.int64), r"^length of rows 0, 1, 2, 3\n +got: +row 0: tensor\(\[1, 1\]\)"),
        (torch.ones(4), r"^length of rows 0, 1, 2, 3\n +got: +row 0: 1.0"),
        ([1, True, 2, False], r"^length of rows 1, 3\n +got: +row 1: True, row 3: False"),
        ([1, 2, 3, 2**63], r"^length of row 3\n"),
    ],
)
def test_lengths_that_are_none(lengths: Any, match: str) -> None:
    with pytest.raises(SampleError, match=match):
        PLAN.micro_batches(lengths)


@pytest.mark.parametrize("lengths", [(5, 4, 9, 1), range(9, 5, -1), np.array([5, 4, 9, 1]), torch.tensor([5, 4, 9, 1])])
def test_lengths_in_every_form(lengths: Any) -> None:
    assert PLAN.micro_batches(lengths) == PLAN.micro_batches(list(map(int, lengths)))


@pytest.mark.parametrize(
    "mask",
    [
        None,
        5,
        {0: [1]},
        "10",
        (m for m in ([1], [1])),
        torch.tensor(1),
        torch.ones(2, 1, 1),
        MASK.to_sparse(),
        MASK + 0j,
    ],
)
def test_masks_of_scaled_advantages_that_are_none(mask: Any) -> None:
    with pytest.raises(SampleError, match=r"^loss masks\n +got: +(None|a value of type|shape \(|a sparse)"):
        scale_advantages(torch.ones(2), mask, torch.ones(2))


@pytest.mark.parametrize("other", [None, 1.0, [1.0, 1.0], torch.tensor(1.0), torch.ones(2, 1), torch.ones(3)])
def test_advantages_and_weights_that_are_not_one_for_each_row(other: Any) -> None:
    with pytest.raises(SampleError, match=r"^weights\n"):
        scale_advantages(torch.ones(2), MASK, other)
    with pytest.raises(SampleError, match=r"^weights\n"):
        scale_advantages(other, MASK, torch.ones(2))
