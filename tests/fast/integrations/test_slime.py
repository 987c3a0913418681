"""What slime's trainer calls: advantages with a KL penalty, and the check of the columns that reached it."""

import inspect
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch

from miles_norm.errors import SampleError
from miles_norm.integrations.miles import convert_samples_to_train_data
from miles_norm.integrations.slime import check_rollout_data, compute_advantages


def rank(**columns: Any) -> dict[str, Any]:
    """Three rows of two rollouts on one rank, another row of rollout 4 with two tokens being elsewhere."""
    masks = [[1, 1, 0], [0, 1], [1]]
    data = {
        "rewards": [0.5, 0.5, -0.5],
        "loss_masks": [torch.tensor(mask, dtype=torch.int32) for mask in masks],
        "kl": [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.0]), torch.tensor([-0.1])],
        "rollout_ids": [4, 4, 9],
        "rollout_mask_sums": torch.tensor([5, 5, 1]),
        **columns,
    }
    return {name: column for name, column in data.items() if column is not None}


def test_parameters_have_the_names_that_slimes_harness_asks_for() -> None:
    assert tuple(inspect.signature(check_rollout_data).parameters) == ("args", "rollout_id", "rollout_data")
    assert tuple(inspect.signature(compute_advantages).parameters) == ("args", "rollout_data")


def test_advantages_are_rewards_less_a_penalty_per_token() -> None:
    data = rank()
    compute_advantages(Namespace(kl_coef=0.5), data)
    # 0.5 - 0.5 * (0.1, 0.2, 0.3); 0.5 - 0.5 * (0.4, 0); -0.5 + 0.5 * 0.1.
    expected = [[0.45, 0.4, 0.35], [0.3, 0.5], [-0.45]]
    for name in ("advantages", "returns"):
        assert [row.dtype for row in data[name]] == [torch.float32] * 3
        assert [row.tolist() for row in data[name]] == [pytest.approx(row) for row in expected]
    assert data["advantages"] is not data["returns"]


def test_without_a_coefficient_advantages_are_the_rewards() -> None:
    data = rank()
    compute_advantages(Namespace(), data)
    assert [row.tolist() for row in data["advantages"]] == [[0.5] * 3, [0.5] * 2, [-0.5]]


def test_a_good_batch_passes() -> None:
    assert check_rollout_data(Namespace(), 0, rank()) is None
    check_rollout_data(Namespace(), 0, rank(rollout_mask_sums=[torch.tensor(n) for n in (3, 3, 1)]))
    check_rollout_data(Namespace(), 0, rank(rollout_ids=None, rollout_mask_sums=[2, 1, 1]))


def test_what_the_convert_hook_returns_passes_on_every_rank() -> None:
    rows = [
        {"group_index": 0, "index": k, "reward": k, "tokens": [7, 8, 9], "loss_mask": mask, "response_length": 2}
        for k, mask in ((0, [1, 1]), (0, [0, 1]), (1, [1, 0]), (1, [0, 0]))
    ]
    data = convert_samples_to_train_data(Namespace(advantage_estimator="grpo"), rows)
    for part in (slice(0, 4), slice(0, None, 2), slice(1, None, 2)):
        check_rollout_data(Namespace(), 0, {name: column[part] for name, column in data.items()})


@pytest.mark.parametrize("call", [partial(check_rollout_data, None, 7), partial(compute_advantages, None)])
def test_a_trainer_that_dropped_the_column_is_refused(call: Any) -> None:
    with pytest.raises(SampleError, match=r"got:      no rollout_mask_sums\n(.*\n)*.*slime that shards this column"):
        call(rank(rollout_mask_sums=None))


@pytest.mark.parametrize(
    ("sums", "rows"),
    [
        ([2, 1, 1], (0, 1)),  # what a conversion per row would give: rollout 4 has three tokens on this rank
        ([5, 4, 1], (1,)),  # two sums for one rollout
        ([5, 5, 0], (2,)),
    ],
)
def test_sums_of_rows_instead_of_rollouts_are_refused(sums: list[int], rows: tuple[int, ...]) -> None:
    with pytest.raises(SampleError, match=r"rollout_mask_sums of rows? .* of this rank in step 7\n") as error:
        check_rollout_data(Namespace(), 7, rank(rollout_mask_sums=sums))
    assert error.value.rows == rows
