"""Which rank and which micro-batch trains each row: whole rollouts, even ranks, as many micro-batches on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import encode_ids
from miles_norm.errors import ConfigError, SampleError, format_rows
from miles_norm.loss import UpdatePlan
from miles_norm.loss.checks import check_type
from miles_norm.sharding.partition import balanced_parts, longest_first, part_loads
from miles_norm.train_data.ragged_checks import running

__all__ = ["Balance", "KeepTogether", "ShardPlan", "plan_shards"]

Balance = Literal["tokens", "strided"]
KeepTogether = Literal["rollouts", "rows"]


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """What each data-parallel rank trains, and in which micro-batches. N rows, U updates, D ranks."""

    lengths: Tensor
    """int64 ``[N]``: tokens of each row."""
    row_update: Tensor
    """int64 ``[N]``: the update of each row, -1 for rows that are in none."""
    row_rank: Tensor
    """int64 ``[N]``: the rank that trains the row, -1 for rows that are in no update."""
    row_micro_batch: Tensor
    """int64 ``[N]``: number of the row's micro-batch within its update and rank, -1 for rows that are in no update."""
    micro_batches: tuple[int, ...]
    """Micro-batches of each of the U updates, the same on every rank; a rank with fewer rows than these has empty
    ones."""
    data_parallel_size: int
    """D."""
    plan: UpdatePlan | None
    """What was scheduled; the loss weights that go with it count its updates."""

    @property
    def left_out(self) -> list[int]:
        """Rows that are in no update, and in no shard."""
        rows: list[int] = torch.nonzero(self.row_rank < 0)[:, 0].tolist()
        return rows

    @cached_property
    def tokens(self) -> Tensor:
        """int64 ``[U, D]``: tokens of each update on each rank."""
        size = self.data_parallel_size
        placed = self.row_rank >= 0
        place = (self.row_update * size + self.row_rank)[placed].numpy()
        cells = len(self.micro_batches) * size
        found = np.bincount(place, weights=self.lengths[placed].numpy(), minlength=cells)  # exact below 2**53
        return torch.from_numpy(found.astype(np.int64).reshape(-1, size))

    @property
    def imbalance(self) -> float:
        """By how much the ranks wait for each other: tokens of the fullest rank, over the updates, relative to the mean
        rank; 0 is none."""
        total = int(self.tokens.sum())
        return float(self.tokens.amax(dim=1).sum() * self.data_parallel_size / total) - 1 if total else 0.0

    def rows_of_rank(self, rank: int) -> Tensor:
        """int64: the rows of a rank in the order in which it trains them: update, micro-batch, row."""
        return self._by_rank[rank]

    def ends_of_rank(self, rank: int) -> list[list[int]]:
        """For each update where its micro-batches end among ``rows_of_rank``, its begin before them."""
        rows = self.rows_of_rank(rank)
        first = running(torch.tensor(self.micro_batches, dtype=torch.int64))
        number = first[self.row_update[rows]] + self.row_micro_batch[rows]
        ends = running(torch.bincount(number, minlength=int(first[-1]))).tolist()
        return [ends[start : stop + 1] for start, stop in pairwise(first.tolist())]

    def schedule(self, rank: int) -> list[list[list[int]]]:
        """Rows of each micro-batch of each update of a rank."""
        rows = self.rows_of_rank(rank).tolist()
        return [[rows[start:stop] for start, stop in pairwise(ends)] for ends in self.ends_of_rank(rank)]

    def report(self) -> str:
        """Tokens, rows and micro-batches of each update, and how even the ranks are."""
        lines = []
        for number, (count, tokens) in enumerate(zip(self.micro_batches, self.tokens.tolist(), strict=True)):
            mean = sum(tokens) / len(tokens)
            rows = int((self.row_update == number).sum())
            apart = f"{max(tokens) / mean - 1:.2%} above the mean" if mean else "without tokens"
            each = "micro-batch" if count == 1 else "micro-batches"
            lines.append(f"update {number}: {rows} rows, {count} {each} a rank, {max(tokens)} tokens at most, {apart}")
        if left_out := self.left_out:
            lines.append(f"in no update: {format_rows(left_out)}")
        return "\n".join(lines)

    @cached_property
    def _by_rank(self) -> list[Tensor]:
        rank, update, batch = (each.numpy() for each in (self.row_rank, self.row_update, self.row_micro_batch))
        rows = np.flatnonzero(rank >= 0)
        rows = rows[np.lexsort((batch[rows], update[rows], rank[rows]))]
        ends = np.searchsorted(rank[rows], np.arange(1, self.data_parallel_size))
        return [torch.from_numpy(part) for part in np.split(rows, ends)]


def plan_shards(
    lengths: Sequence[int] | Tensor,
    data_parallel_size: int,
    plan: UpdatePlan | None = None,
    *,
    rollout: Sequence[Any] | Tensor | None = None,
    balance: Balance = "tokens",
) -> ShardPlan:
    """Give every row of every update to one data-parallel rank, and to one micro-batch of it.

    Rows with one entry of ``rollout`` stay on one rank, so that what is computed over a rollout, such as a ratio of
    sequences, needs no other rank. Micro-batches hold at most the plan's ``max_tokens_per_gpu`` tokens, and each update
    has as many of them on every rank: ranks that gather parameters or gradients per micro-batch would wait for ever
    otherwise. Siblings may be in different micro-batches.

    Because a loss weight belongs to a row, the ranks' losses add up to that of the whole, whoever has which row.

    Args:
        lengths: Tokens of each row, prompt and response ``[N]``.
        data_parallel_size: Number of ranks.
        plan: Of ``plan_updates``: which update each row is in, and the budget of a micro-batch. None: all rows are in
            one update, and that is one micro-batch.
        rollout: Ids ``[N]``, equal for rows that stay together, such as a plan's ``result.index.row_rollout``; None:
            each row is on its own.
        balance: ``tokens``: the fullest rank is as small as can be found. ``strided``: in the order of their first rows
            by turns, as trainers that do not look at lengths do.

    Returns:
        Rows that are in no update are in no shard; all others are in exactly one.

    Raises:
        ConfigError: no rank, or no such balance.
        SampleError: no plan, another number of lengths or ids than rows, a length that is not a whole number from 0 to
            2³¹ - 1, a row longer than the budget; all are named.

    >>> shards = plan_shards([50, 40, 10, 30, 20, 30], 2, rollout=torch.tensor([0, 1, 1, 2, 2, 3]))
    >>> shards.schedule(0), shards.schedule(1), shards.tokens.tolist()
    ([[[0, 3, 4]]], [[[1, 2, 5]]], [[100, 80]])
    """
    _check(data_parallel_size, balance)
    if plan is not None:
        check_type("plan", plan, UpdatePlan, "pass what plan_updates returned")
    sizes = _whole_lengths(lengths)
    rows = len(sizes) if plan is None else len(plan.row_update)
    if len(sizes) != rows:
        raise _wrong_lengths("lengths", f"{len(sizes)} lengths for {rows} rows", ())
    units = None if rollout is None else encode_ids(rollout, "rollout", rows).codes.cpu().numpy()
    update = torch.zeros(rows, dtype=torch.int64) if plan is None else plan.row_update.cpu()
    budget = None if plan is None else plan.config.max_tokens_per_gpu
    if budget is not None:
        long = np.flatnonzero((sizes > budget) & (update.numpy() >= 0)).tolist()
        if long:
            got = ", ".join(f"row {row}: {sizes[row]} tokens" for row in long[:10])
            raise _wrong_lengths(f"length of {format_rows(long)}", f"{got}, with max_tokens_per_gpu={budget}", long)
    rank, micro_batch = np.full(rows, -1), np.full(rows, -1)
    counts = []
    for members in _rows_of_updates(update.numpy()):
        unit = members if units is None else units[members]
        rank[members] = _ranks(unit, sizes[members], data_parallel_size, balance)
        micro_batch[members], count = _micro_batches(rank[members], sizes[members], data_parallel_size, budget)
        counts.append(count)
    return ShardPlan(
        lengths=torch.from_numpy(sizes),
        row_update=update,
        row_rank=torch.from_numpy(rank),
        row_micro_batch=torch.from_numpy(micro_batch),
        micro_batches=tuple(counts),
        data_parallel_size=data_parallel_size,
        plan=plan,
    )


Array = np.ndarray[Any, Any]


def _rows_of_updates(update: Array) -> list[Array]:
    """Rows of each update, ascending."""
    order = np.argsort(update, kind="stable")
    order = order[np.searchsorted(update[order], 0) :]
    numbers = update[order]
    ends = np.searchsorted(numbers, np.arange(numbers[-1] + 1 if len(numbers) else 0), side="right")
    return np.split(order, ends[:-1]) if len(ends) else []


def _ranks(unit: Array, sizes: Array, ranks: int, balance: Balance) -> Array:
    """The rank of each row of an update."""
    _, first, number = np.unique(unit, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first)] = np.arange(len(first))  # units in the order of their first rows
    if balance == "strided":
        return place[number] % ranks
    weights = np.bincount(place[number], weights=sizes, minlength=len(first)).astype(np.int64)
    return np.asarray(balanced_parts(weights.tolist(), ranks))[place[number]]


def _micro_batches(rank: Array, sizes: Array, ranks: int, budget: int | None) -> tuple[Array, int]:
    """The micro-batch of each row, and how many there are: as few as keep all of them below the budget."""
    if budget is None:
        return np.zeros_like(rank), 1
    rows_of = [np.flatnonzero(rank == one) for one in range(ranks)]
    weights = [sizes[rows].tolist() for rows in rows_of]
    count = max(1, *(-(-sum(each) // budget) for each in weights))
    while True:
        parts = [longest_first(each, count) for each in weights]
        if all(max(part_loads(each, part, count)) <= budget for each, part in zip(weights, parts, strict=True)):
            break
        count += 1
    found = np.empty_like(rank)
    for rows, part in zip(rows_of, parts, strict=True):
        found[rows] = part
    return found, count


def _whole_lengths(lengths: Sequence[int] | Tensor) -> Array:
    given = lengths.cpu().numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        got = f"shape {list(given.shape)}, dtype {given.dtype}"
        raise _wrong_lengths("lengths", got, ())
    bad = np.flatnonzero((given < 0) | (given >= 2**31)).tolist() if given.size else []
    if bad:
        got = ", ".join(f"row {row}: {given[row]}" for row in bad[:10])
        raise _wrong_lengths(f"length of {format_rows(bad)}", got, bad)
    return given.astype(np.int64)


def _wrong_lengths(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="the tokens of each row, a whole number from 0 to 2**31 - 1 and within the budget of a micro-batch",
        reason="ranks are balanced by tokens, and a micro-batch must fit the memory of one device",
        remedy="pass one length per row; raise max_tokens_per_gpu, or cut the row before it is trained",
        rows=rows,
    )


def _check(data_parallel_size: int, balance: str) -> None:
    whole = isinstance(data_parallel_size, int) and not isinstance(data_parallel_size, bool)
    if not whole or data_parallel_size < 1:
        raise ConfigError(
            "data_parallel_size",
            got=repr(data_parallel_size),
            expected="a whole number from 1 on",
            reason="each rank gets a shard",
            remedy="pass the number of data-parallel ranks",
        )
    check_choice("balance", balance, get_args(Balance), "it decides which rank trains a row")


def check_choice(name: str, given: object, choices: Sequence[str], reason: str) -> None:
    """Refuse a setting that does not exist.

    Raises:
        ConfigError: naming the choices.
    """
    if given not in choices:
        raise ConfigError(
            name,
            got=repr(given),
            expected=" or ".join(map(repr, choices)),
            reason=reason,
            remedy="choose one of them",
        )
