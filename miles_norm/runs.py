"""Find and number the rollouts of a batch from two columns of codes, without a loop over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.host import host_numbers

__all__ = ["NumberedRuns", "number_rows"]


Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Runs:
    """Maximal stretches of rows with equal (group, rollout), after ``order`` where rows had to be sorted."""

    start: Tensor
    """int64 ``[R]``: position of the first row of each run."""
    new_run: Tensor
    """bool ``[N]``: a run starts here."""
    new_group: Tensor
    """bool ``[R]``: the run is the first of its group."""
    order: Tensor | None
    """int64 ``[N]``: the row at each position; None where rows stand as they came."""


@dataclass(frozen=True, eq=False)
class NumberedRuns:
    """Runs and groups, numbered by their first row."""

    row_run: Tensor
    run_group: Tensor
    first_row: Tensor
    num_groups: int
    by_group: Tensor | None
    """int64 ``[R]``: numbers of the runs, group 0 first; None where that is 0, 1, 2, ..."""


def number_rows(group: Tensor, rollout: Tensor | None, num_groups: int | None) -> NumberedRuns:
    """Find and number the rollouts of a batch; ``num_groups`` says that the group codes are 0 to ``num_groups - 1``."""
    if group.device.type == "cpu":
        numbered = _ascending_rows(group.numpy(), None if rollout is None else rollout.numpy(), num_groups)
        if numbered is not None:
            return numbered
    return number_runs(find_runs(group, rollout), group, num_groups)


def _ascending_rows(group: Array, rollout: Array | None, num_groups: int | None) -> NumberedRuns | None:
    """The common case, rows in the order of their groups and rollouts, in numpy; None for any other.

    The same as below: on a small batch a call of torch costs more than its arithmetic.
    """
    new_group = np.empty(len(group), dtype=bool)
    new_group[0] = True
    np.not_equal(group[1:], group[:-1], out=new_group[1:])
    if rollout is None:
        start, of_run = np.arange(len(group)), new_group
        run = start
    else:
        new_run = new_group.copy()
        new_run[1:] |= rollout[1:] != rollout[:-1]
        start = new_run.nonzero()[0]
        of_run, ids = new_group[start], rollout[start]
        if not ((ids[1:] > ids[:-1]) | of_run[1:]).all():
            return None
        run = new_run.cumsum()
        run -= 1
    codes = group[start[of_run]]
    if not (codes[1:] > codes[:-1]).all():
        return None
    run_group = group[start] if num_groups is not None else of_run.cumsum() - 1
    groups = num_groups if num_groups is not None else len(codes)
    row_run, of_group, first_row = (torch.from_numpy(part) for part in (run, run_group, start))
    return NumberedRuns(row_run, of_group, first_row, groups, None)


def find_runs(group: Tensor, rollout: Tensor | None) -> Runs:
    """Rows of each (group, rollout): as they stand if every pair is one stretch of rows, else after one stable sort."""
    runs = _runs(group, rollout, None)
    if _each_pair_once(group, rollout, runs):
        return runs
    order = _sorted_rows(group, rollout)
    return _runs(group[order], None if rollout is None else rollout[order], order)


def _runs(group: Tensor, rollout: Tensor | None, order: Tensor | None) -> Runs:
    first = torch.ones(1, dtype=torch.bool, device=group.device)
    new_group = torch.cat([first, group[1:] != group[:-1]])
    if rollout is None:
        start = torch.arange(len(group), device=group.device)
        return Runs(start, torch.ones_like(new_group), new_group, order)
    new_run = new_group.clone()
    new_run[1:] |= rollout[1:] != rollout[:-1]
    start = torch.nonzero(new_run)[:, 0]
    return Runs(start, new_run, new_group[start], order)


def _each_pair_once(group: Tensor, rollout: Tensor | None, runs: Runs) -> bool:
    heads = group[runs.start[runs.new_group]]
    if not _distinct(heads):
        return False
    if rollout is None:
        return True
    ids = rollout[runs.start]
    if bool(((ids[1:] > ids[:-1]) | runs.new_group[1:]).all()):
        return True
    number = torch.cumsum(runs.new_group, 0)
    order = _sorted_rows(number, ids)
    number, ids = number[order], ids[order]
    return not bool(((number[1:] == number[:-1]) & (ids[1:] == ids[:-1])).any())


def _distinct(codes: Tensor) -> bool:
    if bool((codes[1:] > codes[:-1]).all()):
        return True
    codes = torch.sort(codes).values
    return bool((codes[1:] != codes[:-1]).all())


def _sorted_rows(group: Tensor, rollout: Tensor | None) -> Tensor:
    """Rows by (group, rollout, row)."""
    if rollout is None:
        return torch.sort(group, stable=True).indices
    low, high, least, most = host_numbers(*torch.aminmax(group), *torch.aminmax(rollout))
    span = most - least + 1
    if (high - low + 1) * span < 2**63:
        return torch.sort((group - low) * span + (rollout - least), stable=True).indices
    by_rollout = torch.sort(rollout, stable=True).indices
    return by_rollout[torch.sort(group[by_rollout], stable=True).indices]


def number_runs(runs: Runs, group: Tensor, num_groups: int | None) -> NumberedRuns:
    """Number runs by their first row, and groups too unless their codes are 0 to ``num_groups - 1`` already."""
    run = torch.cumsum(runs.new_run, 0).sub_(1)
    run_group = torch.cumsum(runs.new_group, 0).sub_(1)
    if runs.order is None:
        if num_groups is not None:
            return NumberedRuns(run, group[runs.start], runs.start, num_groups, None)
        return NumberedRuns(run, run_group, runs.start, int(run_group[-1]) + 1, None)
    first_row = runs.order[runs.start]
    rank = _rank_by_row(first_row, len(run))
    row_run = torch.empty_like(run).scatter_(0, runs.order, rank[run])
    if num_groups is not None:
        groups = group[first_row]
    else:
        num_groups = int(run_group[-1]) + 1
        group_first = run_group.new_full((num_groups,), len(run)).scatter_reduce_(0, run_group, first_row, "amin")
        groups = _rank_by_row(group_first, len(run))[run_group]
    run_group = torch.empty_like(groups).scatter_(0, rank, groups)
    first_row = torch.empty_like(first_row).scatter_(0, rank, first_row)
    return NumberedRuns(row_run, run_group, first_row, num_groups, torch.sort(run_group, stable=True).indices)


def _rank_by_row(row: Tensor, rows: int) -> Tensor:
    """Rank of distinct row numbers without a sort: mark them, count the marks."""
    mark = torch.zeros(rows, dtype=torch.bool, device=row.device)
    mark[row] = True
    return torch.cumsum(mark, 0).sub_(1)[row]
