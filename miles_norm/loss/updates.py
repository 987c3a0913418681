"""Cut a batch into optimizer steps, by whole rollouts, or by rows as verl and Agent Lightning do."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch
from torch import Tensor

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import UpdateConfig
from miles_norm.counting import Exclusion
from miles_norm.errors import SampleError, format_rows
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards

__all__ = ["CarriedRollout", "UpdatePlan", "plan_updates"]


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
    """Counted rollouts that lost all their rows."""
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
            SampleError: another number of lengths than rows, a length that is not a whole number from 0 on, or a row
                longer than the budget; all are named.
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


def plan_updates(result: NormalizedRewards, config: UpdateConfig | None = None, *, step: int = 0) -> UpdatePlan:
    """Decide which rows each optimizer step holds.

    ``unit="rollouts"``: counted rollouts in the order of their first rows, never split over two updates. What does not
    fill an update is a smaller last one (its rollouts weigh more there; ``divisor="nominal_rollouts"`` equalizes), is
    dropped, or is carried to the next batch. Advantages stay as they are: a late rollout never renormalizes siblings
    that are trained already.

    ``unit="rows"``: the rows of counted rollouts are cut down to a multiple of ``rows_per_update``, and to
    ``max_updates`` of these; rows of groups whose rewards are all equal go first, others at random. This is the rule of
    verl's mini-batches and of Agent Lightning, with its counts but not its random picks; it splits rollouts over
    updates and drops parts of them. ``order="drop_first"`` computes the advantages of what is left, as Agent Lightning
    does.

    Args:
        step: Number of the batch; makes the group keys of carried rollouts unlike those of other batches.

    Why whole rollouts: a row that is dropped takes its tokens out of the rollout's mean, and a rollout that is split is
    trained on two policies.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 4, rollout=[0, 0, 1, 2], reward=[1, 1, 0, 0], trainable_tokens=[1] * 4)
    >>> plan_updates(normalize_columns(columns), UpdateConfig(rollouts_per_update=2)).updates
    [[0, 1, 2], [3]]
    """
    config = config or UpdateConfig()
    if config.unit == "rows":
        return _plan_rows(result, config, step)
    return _plan_rollouts(result, config, step)


def _trainable_rows(result: NormalizedRewards) -> Tensor:
    """bool ``[N]``: rows of counted rollouts, padding aside."""
    rows = result.counted_rollouts[result.index.row_rollout]
    return rows if result.columns.padding is None else rows & ~result.columns.padding


def _plan_rollouts(result: NormalizedRewards, config: UpdateConfig, step: int) -> UpdatePlan:
    index = result.index
    counted = torch.nonzero(result.counted_rollouts)[:, 0]
    size = config.rollouts_per_update or max(len(counted), 1)
    update = torch.full_like(index.rollout_group, -1)
    update[counted] = torch.div(torch.arange(len(counted), device=update.device), size, rounding_mode="floor")
    left: list[int] = []
    if config.leftover != "smaller_update" and len(counted) % size:
        left = counted[len(counted) - len(counted) % size :].tolist()
        update[left] = -1
    row_update = torch.where(_trainable_rows(result), update[index.row_rollout], -1)
    return UpdatePlan(
        config=config,
        result=result,
        row_update=row_update,
        dropped_rollouts=left if config.leftover == "drop" else [],
        carried_rollouts=left if config.leftover == "carry" else [],
        partly_dropped_rollouts=[],
        step=step,
    )


def _plan_rows(result: NormalizedRewards, config: UpdateConfig, step: int) -> UpdatePlan:
    index, size = result.index, config.rows_per_update or 1
    rows: list[int] = torch.nonzero(_trainable_rows(result))[:, 0].tolist()
    keep = len(rows) // size * size
    if config.max_updates is not None:
        keep = min(keep, size * config.max_updates)
    dropped = _rows_to_drop(result, rows, len(rows) - keep, config.seed)
    gone = torch.zeros(index.num_rows, dtype=torch.bool, device=index.row_rollout.device)
    gone[dropped] = True
    without = set(dropped)
    kept = [row for row in rows if row not in without]
    row_update = torch.full_like(index.row_rollout, -1)
    row_update[kept] = torch.arange(len(kept), device=row_update.device) // size
    lost = set(index.row_rollout[dropped].tolist())
    left = set(index.row_rollout[kept].tolist())
    return UpdatePlan(
        config=config,
        result=_normalized_without(result, gone) if config.order == "drop_first" and dropped else result,
        row_update=row_update,
        dropped_rollouts=sorted(lost - left),
        carried_rollouts=[],
        partly_dropped_rollouts=sorted(lost & left),
        step=step,
    )


def _rows_to_drop(result: NormalizedRewards, rows: list[int], number: int, seed: int) -> list[int]:
    """Rows of groups without a signal first, then any; drawn with the seed."""
    draw = random.Random(seed)
    silent = result.statistics.equal[result.index.row_group].tolist()
    first = [row for row in rows if silent[row]]
    rest = [row for row in rows if not silent[row]]
    draw.shuffle(first)
    draw.shuffle(rest)
    return sorted((first + rest)[:number])


def _normalized_without(result: NormalizedRewards, gone: Tensor) -> NormalizedRewards:
    """The result for the rows that are left: the others enter nothing, as padding does."""
    columns = result.columns
    padding = gone if columns.padding is None else columns.padding | gone
    sizes = None
    if result.index.group_source in ("prompt_group_sizes", "nesting"):
        sizes = torch.bincount(result.index.row_group, minlength=result.index.num_groups)
    left = normalize_columns(_with_padding(columns, padding), result.config, sizes)
    if result.exclusion is None:
        return left
    # What a filter took out is in no update, so it stays out; the first reason that applied stays the reason.
    if left.exclusion is None:
        return left.with_exclusion(result.exclusion)
    return left.with_exclusion(torch.where(result.exclusion == Exclusion.COUNTED, left.exclusion, result.exclusion))


def _with_padding(columns: RolloutColumns, padding: Tensor) -> RolloutColumns:
    changed = object.__new__(RolloutColumns)
    for name in RolloutColumns.__slots__:
        setattr(changed, name, getattr(columns, name))
    changed.padding = padding
    return changed


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
    given = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    bad = [row for row, length in enumerate(given) if not isinstance(length, Integral) or length < 0]
    if bad:
        raise _wrong_lengths(
            f"length of {format_rows(bad)}", ", ".join(f"row {row}: {given[row]!r}" for row in bad[:10]), bad
        )
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
