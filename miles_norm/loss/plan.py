"""Which rows each optimizer step and each micro-batch holds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from miles_norm.columns.ids import entries_of
from miles_norm.config import UpdateConfig
from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.loss.checks import described, is_whole
from miles_norm.result import NormalizedRewards

__all__ = ["CarriedRollout", "UpdatePlan"]


@dataclass(frozen=True)
class CarriedRollout:
    """A rollout that is trained together with the next batch, with the advantage it has now."""

    rows: tuple[int, ...]
    rollout_id: Hashable
    group_key: tuple[Hashable, ...]
    """Unlike the key of any group of another batch, so that it is never normalized together with one."""
    advantage: float


@dataclass(frozen=True, eq=False)
class UpdatePlan:
    """Which rows each optimizer step holds."""

    config: UpdateConfig
    result: NormalizedRewards
    """What the plan was made for; under ``order="drop_first"`` normalized anew over the rows that are left."""
    row_update: Tensor
    """int64 ``[N]``: the update of each row, -1 for rows that are in none."""
    dropped_rollouts: list[int]
    """Counted rollouts that are in no update: they lost all rows, or count no more in what ``drop_first`` left."""
    carried_rollouts: list[int]
    """Counted rollouts that wait for the next batch."""
    partly_dropped_rollouts: list[int]
    """Rollouts that lost some of their rows; only under ``unit="rows"``."""
    step: int

    @cached_property
    def num_updates(self) -> int:
        """Number of optimizer steps."""
        return int(self.row_update.max()) + 1

    @cached_property
    def updates(self) -> list[list[int]]:
        """Rows of each update, ascending."""
        order = torch.sort(self.row_update, stable=True).indices
        order = order[self.row_update[order] >= 0]
        sizes = torch.bincount(self.row_update[order], minlength=self.num_updates)
        return [part.tolist() for part in order.split(sizes.tolist())]

    @property
    def carried(self) -> list[CarriedRollout]:
        """Everything that is needed to train the carried rollouts later."""
        index = self.result.index
        return [
            CarriedRollout(
                rows=tuple(index.rows_of_rollout(rollout)),
                rollout_id=index.rollout_ids[rollout],
                group_key=("carried", self.step, index.group_ids[int(index.rollout_group[rollout])]),
                advantage=float(self.result.rollout_advantages[rollout]),
            )
            for rollout in self.carried_rollouts
        ]

    def micro_batches(self, lengths: Sequence[int] | Tensor) -> list[list[list[int]]]:
        """Cut each update into micro-batches of at most ``max_tokens_per_gpu`` tokens: first fit, longest rows first.

        Siblings may sit in different micro-batches: weights belong to rows, so the sum over all of them is the loss of
        the update.

        Args:
            lengths: Tokens of each row, prompt and response ``[N]``.

        Raises:
            SampleError: no list, array or tensor ``[N]``, another number of lengths than rows, a length that is not a
                whole number from 0 on, or a row longer than the budget; all are named.
        """
        sizes = _whole_lengths(lengths)
        if len(sizes) != len(self.row_update):
            raise _wrong_lengths("lengths", f"{len(sizes)} lengths for {len(self.row_update)} rows", ())
        budget = self.config.max_tokens_per_gpu
        if budget is None:
            return [[rows] for rows in self.updates]
        long = [row for rows in self.updates for row in rows if sizes[row] > budget]
        if long:
            got = ", ".join(f"row {row}: {sizes[row]} tokens" for row in long[:10])
            raise _wrong_lengths(f"length of {format_rows(long)}", f"{got}, with max_tokens_per_gpu={budget}", long)
        return [_first_fit(rows, sizes, budget) for rows in self.updates]

    def report(self) -> str:
        """Rows and rollouts of each update, and what is in none."""
        index = self.result.index
        lines = []
        for number, rows in enumerate(self.updates):
            rollouts = len(set(index.row_rollout[rows].tolist()))
            tokens = int(self.result.trainable_tokens[rows].sum())
            counts = ((rollouts, "rollout"), (len(rows), "row"), (tokens, "trainable token"))
            counted = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
            lines.append(f"update {number}: {counted}")
        for name in ("dropped", "carried", "partly_dropped"):
            rollouts_in_none: list[int] = getattr(self, f"{name}_rollouts")
            if rollouts_in_none:
                ids = [index.rollout_ids[rollout] for rollout in rollouts_in_none]
                lines.append(f"{name.replace('_', ' ')}: {format_rows(ids, 'rollout')}")
        return "\n".join(lines)


def _first_fit(rows: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    free: list[int] = []
    for row in sorted(rows, key=lambda row: -sizes[row]):
        fitting = next((n for n, room in enumerate(free) if room >= sizes[row]), None)
        if fitting is None:
            batches.append([row])
            free.append(budget - sizes[row])
        else:
            batches[fitting].append(row)
            free[fitting] -= sizes[row]
    return batches


def _whole_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    given = entries_of(lengths)
    if given is None:
        raise _wrong_lengths("lengths", described(lengths), ())
    bad = [row for row, length in enumerate(given) if not is_whole(length)]
    if bad:
        got = ", ".join(f"row {row}: {shown(given[row])}" for row in bad[:10])
        raise _wrong_lengths(f"length of {format_rows(bad)}", got, bad)
    return [int(length) for length in given]


def _wrong_lengths(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="the tokens of each row, prompt and response, within the budget of a micro-batch",
        reason="a micro-batch must fit the memory of one device, and a row cannot be split",
        remedy="raise max_tokens_per_gpu, or cut the row before it is trained",
        rows=rows,
    )
