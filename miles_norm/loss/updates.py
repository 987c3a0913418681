"""Cut a batch into optimizer steps, by whole rollouts, or by rows as verl and Agent Lightning do."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from miles_norm.config import UpdateConfig
from miles_norm.counting import Exclusion
from miles_norm.errors import ConfigError, shown
from miles_norm.loss.checks import check_type, is_whole
from miles_norm.loss.plan import UpdatePlan
from miles_norm.normalize import normalize_grouped
from miles_norm.result import NormalizedRewards

__all__ = ["counted_rows", "plan_updates"]


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
    does. A rollout that counts no more in it, such as one whose group became smaller than ``min_group_size``, is
    dropped too, so that the last update may be smaller.

    Args:
        result: Of ``normalize_rewards``.
        config: Defaults to ``UpdateConfig()``: all counted rollouts in one update.
        step: Number of the batch; makes the group keys of carried rollouts unlike those of other batches.

    Raises:
        SampleError: no result.
        ConfigError: no ``UpdateConfig``, or a step that is no whole number.

    Why whole rollouts: a row that is dropped takes its tokens out of the rollout's mean, and a rollout that is split is
    trained on two policies.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 4, rollout=[0, 0, 1, 2], reward=[1, 1, 0, 0], trainable_tokens=[1] * 4)
    >>> plan_updates(normalize_columns(columns), UpdateConfig(rollouts_per_update=2)).updates
    [[0, 1, 2], [3]]
    """
    check_type("result", result, NormalizedRewards, "pass what normalize_rewards returned")
    config = UpdateConfig.checked(config)
    if not is_whole(step):
        raise ConfigError(
            "step of plan_updates",
            got=shown(step),
            expected="a whole number from 0 on",
            reason="it is a part of the group keys of carried rollouts",
            remedy="pass the number of the batch",
        )
    if config.unit == "rows":
        return _plan_rows(result, config, step)
    return _plan_rollouts(result, config, step)


def counted_rows(result: NormalizedRewards) -> Tensor | None:
    """bool ``[N]``: rows of counted rollouts, padding aside; None if these are all rows."""
    padding = result.columns.padding
    if result.exclusion is None:
        return None if padding is None else ~padding
    rows = result.counted_rollouts.index_select(0, result.index.row_rollout)
    return rows if padding is None else rows & ~padding


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
    row_update, rows = update[index.row_rollout], counted_rows(result)
    return UpdatePlan(
        config=config,
        result=result,
        row_update=row_update if rows is None else row_update.masked_fill(~rows, -1),
        dropped_rollouts=left if config.leftover == "drop" else [],
        carried_rollouts=left if config.leftover == "carry" else [],
        partly_dropped_rollouts=[],
        step=step,
    )


def _plan_rows(result: NormalizedRewards, config: UpdateConfig, step: int) -> UpdatePlan:
    index, size = result.index, config.rows_per_update or 1
    rows = _row_numbers(result)
    keep = len(rows) // size * size
    if config.max_updates is not None:
        keep = min(keep, size * config.max_updates)
    dropped = _rows_to_drop(result, rows, len(rows) - keep, config.seed)
    planned, kept = result, sorted(set(rows).difference(dropped))
    if config.order == "drop_first" and dropped:
        planned = _normalized_without(result, dropped)
        kept = _row_numbers(planned)
    row_update = torch.full_like(index.row_rollout, -1)
    row_update[kept] = torch.arange(len(kept), device=row_update.device) // size
    lost = set(index.row_rollout[sorted(set(rows).difference(kept))].tolist())
    left = set(index.row_rollout[kept].tolist())
    return UpdatePlan(
        config=config,
        result=planned,
        row_update=row_update,
        dropped_rollouts=sorted(lost - left),
        carried_rollouts=[],
        partly_dropped_rollouts=sorted(lost & left),
        step=step,
    )


def _row_numbers(result: NormalizedRewards) -> list[int]:
    """The numbers of ``counted_rows``."""
    rows = counted_rows(result)
    numbers: list[int] = list(range(result.index.num_rows)) if rows is None else torch.nonzero(rows)[:, 0].tolist()
    return numbers


def _rows_to_drop(result: NormalizedRewards, rows: list[int], number: int, seed: int) -> list[int]:
    """Rows of groups without a signal first, then any; drawn with the seed."""
    draw = random.Random(seed)
    silent = result.statistics.equal[result.index.row_group].tolist()
    first = [row for row in rows if silent[row]]
    rest = [row for row in rows if not silent[row]]
    draw.shuffle(first)
    draw.shuffle(rest)
    return sorted((first + rest)[:number])


def _normalized_without(result: NormalizedRewards, gone: list[int]) -> NormalizedRewards:
    """The result for the rows that are left, in the same groups: the others enter nothing, as padding does."""
    columns = result.columns
    padding = torch.zeros_like(columns.reward, dtype=torch.bool) if columns.padding is None else columns.padding.clone()
    padding[gone] = True
    left = normalize_grouped(columns.with_padding(padding), result.index, result.config)
    if result.exclusion is None:
        return left
    # What a filter took out is in no update, so it stays out; the first reason that applied stays the reason.
    if left.exclusion is None:
        return left.with_exclusion(result.exclusion)
    return left.with_exclusion(torch.where(result.exclusion == Exclusion.COUNTED, left.exclusion, result.exclusion))
