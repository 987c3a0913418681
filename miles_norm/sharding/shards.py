"""Train data cut into one shard per data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from torch import Tensor

from miles_norm.columns.ids import encode_ids
from miles_norm.errors import SampleError
from miles_norm.loss import UpdatePlan
from miles_norm.loss.checks import check_type
from miles_norm.sharding.schedule import Balance, KeepTogether, ShardPlan, check_choice, plan_shards
from miles_norm.train_data import TrainData

__all__ = ["Shard", "rows_are_free", "split_by_data_parallel"]


@dataclass(frozen=True, eq=False)
class Shard:
    """What one data-parallel rank trains, in the order in which it does."""

    rank: int
    data: TrainData
    """The rows of the rank: update after update, and within one micro-batch after micro-batch."""
    rows: Tensor
    """int64 ``[n]``: the number that each of them has in the whole."""
    ends: list[list[int]]
    """For each update where its micro-batches end, its begin before them."""

    def micro_batches(self, update: int) -> Iterator[TrainData]:
        """The micro-batches of an update, views of ``data``; empty ones too, so that every rank has as many."""
        return (self.data.select(slice(start, stop)) for start, stop in pairwise(self.ends[update]))


def split_by_data_parallel(
    data: TrainData,
    data_parallel_size: int,
    plan: UpdatePlan | None = None,
    *,
    balance: Balance = "tokens",
    keep_together: KeepTogether = "rollouts",
) -> list[Shard]:
    """Cut train data into one shard per data-parallel rank, each with its schedule of updates and micro-batches.

    Args:
        data: Of ``convert_samples_to_train_data``; ``train_data_from_result`` takes the plan for its column
            ``weights``, so that these count what an update holds.
        data_parallel_size: Number of ranks.
        plan: Of ``plan_updates``; None: one update of one micro-batch.
        balance: ``tokens`` or ``strided``, see ``plan_shards``.
        keep_together: ``rollouts``: the rows that a rollout has in an update are on one rank. ``rows``: each row is on
            its own, which balances better where rollouts are long.

    Raises:
        SampleError: no train data, no plan or one for other rows, data without the column ``rollout_ids``, and as
            ``plan_shards``.
        ConfigError: no rank, or settings that do not exist.

    >>> from miles_norm import convert_samples_to_train_data
    >>> rows = [{"group_index": 0, "index": i // 2, "reward": i // 2, "tokens": [1] * (4 + i), "response_length": 2}
    ...         for i in range(4)]
    >>> shards = split_by_data_parallel(convert_samples_to_train_data(rows), 2)
    >>> [(shard.rows.tolist(), shard.data.num_tokens) for shard in shards]
    [([2, 3], 13), ([0, 1], 9)]
    """
    check_type("train data", data, TrainData, "pass what convert_samples_to_train_data returned")
    if plan is not None:
        check_type("plan", plan, UpdatePlan, "pass what plan_updates returned")
    rollout = None if rows_are_free(keep_together) else _rollouts(data, plan)
    lengths = data["tokens"].lengths
    return cut(data, plan_shards(lengths, data_parallel_size, plan, rollout=rollout, balance=balance))


def rows_are_free(keep_together: str) -> bool:
    """Whether rows of a rollout may be on several ranks.

    Raises:
        ConfigError: no such setting.
    """
    check_choice("keep_together", keep_together, get_args(KeepTogether), "it decides which rows stay on one rank")
    return keep_together == "rows"


def cut(data: TrainData, plan: ShardPlan) -> list[Shard]:
    """The shards of a plan."""
    ranks = range(plan.data_parallel_size)
    return [
        Shard(rank, data.select(plan.rows_of_rank(rank)), plan.rows_of_rank(rank), plan.ends_of_rank(rank))
        for rank in ranks
    ]


def _rollouts(data: TrainData, plan: UpdatePlan | None) -> Tensor:
    """int64 ``[N]``: equal for the rows of a rollout."""
    if plan is not None:
        return plan.result.index.row_rollout
    if "rollout_ids" not in data.columns:
        raise SampleError(
            "rollouts of train data",
            got=f"no column rollout_ids; there are {', '.join(data.columns)}",
            expected="an id for each row, equal for the rows of a rollout",
            reason="the rows of a rollout stay on one rank (keep_together is 'rollouts')",
            remedy="make the data with convert_samples_to_train_data, pass a plan, or set keep_together='rows'",
        )
    return encode_ids(data["rollout_ids"], "rollout", len(data)).codes
