"""What slime's trainer calls: advantages with a KL penalty, and the check of the columns that reached it."""

import inspect
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch

from miles_norm.errors import ConfigError, SampleError
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


CALLS = pytest.mark.parametrize("call", [partial(check_rollout_data, None, 7), partial(compute_advantages, None)])


def in_tensors(*ids: int) -> list[torch.Tensor]:
    return [torch.tensor(number) for number in ids]


def test_ids_are_compared_by_value() -> None:
    """Tensors hash by identity: each row would be a rollout, and sums per row would pass."""
    for ids in (in_tensors(4, 4, 9), torch.tensor([4, 4, 9]), ["x", "x", "y"], [4.0, 4, 9]):
        check_rollout_data(Namespace(), 0, rank(rollout_ids=ids))
        with pytest.raises(SampleError, match="rollout_mask_sums of rows 0, 1 of this rank"):
            check_rollout_data(Namespace(), 0, rank(rollout_ids=ids, rollout_mask_sums=[2, 1, 1]))


@CALLS
@pytest.mark.parametrize("value", [2.5, None, True, -1, float("nan"), "3", 2**63, [3]])
def test_sums_that_are_no_counts(call: Any, value: Any) -> None:
    with pytest.raises(SampleError, match="rollout_mask_sums of rows 0, 2") as error:
        call(rank(rollout_mask_sums=[value, 5, value]))
    assert error.value.rows == (0, 2)


@CALLS
@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"rollout_ids": [4, 4]}, r"rollout_ids: 2 entries\n  expected: .* 3 in each"),
        ({"rollout_mask_sums": [5, 5, 1, 1]}, r"loss_masks: 3 entries, rollout_ids: 3 entries"),
        ({"loss_masks": None, "rollout_ids": 7}, "loss_masks: a value of type NoneType, rollout_ids: .* type int"),
        ({"loss_masks": "101"}, "loss_masks: a value of type str"),
        ({"rollout_ids": [4, None, 9]}, "rollout_ids of row 1"),
        ({"rollout_ids": [True, 4, 9]}, "rollout id of row 0"),
        ({"rollout_ids": [[4], 4, [9]]}, "rollout id of rows 0, 2"),
        ({"loss_masks": [[1, 1, 2], [0, -1], [1]]}, r"loss_masks of rows 0, 1.*\n.* row 1: with entries other .* -1"),
        ({"loss_masks": [torch.tensor([1.0, float("nan")]), [1], [1]]}, "loss_masks of row 0"),
        ({"loss_masks": [None, torch.ones(2, 2), torch.ones(1, device="meta")]}, "loss_masks of rows 0, 1, 2"),
    ],
)
def test_columns_that_do_not_fit(call: Any, columns: dict[str, Any], match: str) -> None:
    with pytest.raises(SampleError, match=match):
        call({**rank(), **columns})


@CALLS
@pytest.mark.parametrize("data", [None, [1], "rewards", 7])
def test_what_is_no_batch(call: Any, data: Any) -> None:
    with pytest.raises(SampleError, match="expected: columns by name"):
        call(data)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"rewards": None}, "rewards: a value of type NoneType"),
        ({"kl": None}, "kl: a value of type NoneType"),
        ({"rewards": [0.5, 0.5], "kl": [torch.ones(1)] * 4}, "rewards: 2 entries, kl: 4 entries"),
        ({"rewards": [float("nan"), 0.5, None]}, "rewards of rows 0, 2"),
        ({"rewards": ["0.5", True, torch.ones(2)]}, "rewards of rows 0, 1, 2"),
        ({"kl": [torch.tensor([float("nan")]), torch.ones(1), torch.tensor([float("inf")])]}, "kl of rows 0, 2"),
        ({"kl": [[0.1], torch.ones(1, 1), torch.ones(1, dtype=torch.int64)]}, "kl of rows 0, 1, 2"),
    ],
)
def test_rewards_and_kl_are_finite_numbers(columns: dict[str, Any], match: str) -> None:
    data = {**rank(), **columns}
    with pytest.raises(SampleError, match=match):
        compute_advantages(Namespace(kl_coef=0.5), data)
    assert "advantages" not in data


def test_rewards_may_be_tensors() -> None:
    for rewards in (torch.tensor([0.5, 0.5, -0.5]), [torch.tensor([0.5]), torch.tensor(0.5), -0.5]):
        data = rank(rewards=rewards)
        compute_advantages(Namespace(), data)
        assert [row.tolist() for row in data["advantages"]] == [[0.5] * 3, [0.5] * 2, [-0.5]]


@pytest.mark.parametrize("coefficient", [None, "0.1", float("nan"), -0.1, True, [0.1], torch.tensor(0.1)])
def test_a_coefficient_that_is_none(coefficient: Any) -> None:
    with pytest.raises(ConfigError, match="--kl-coef\n"):
        compute_advantages(Namespace(kl_coef=coefficient), rank())
