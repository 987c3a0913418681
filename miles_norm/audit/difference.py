"""Two sets of advantages on the same rows: what changes, for whom, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from miles_norm.grouping import RolloutIndex

__all__ = ["Advantages", "Difference", "RolloutChange", "compare_advantages"]


@dataclass(frozen=True, eq=False)
class Advantages:
    """Advantages of every row under one rule."""

    values: Tensor
    """float ``[N]``."""
    trained: Tensor | None = None
    """bool ``[N]``: the row trains; None where the rule does not say."""


@dataclass(frozen=True)
class RolloutChange:
    """A rollout with a row that changes."""

    rollout: int
    rows: tuple[int, ...]
    """Those that change."""
    before: tuple[float, float]
    """Smallest and largest advantage of these rows."""
    after: tuple[float, float]
    largest: float
    """Largest absolute change; infinite where one side is no number."""
    flips: int
    """Rows that are pushed the other way."""
    training: int
    """Rows that are trained on one side only."""


@dataclass(frozen=True, eq=False)
class Difference:
    """What changes from one rule to another."""

    index: RolloutIndex
    before: Advantages
    after: Advantages
    changed: Tensor
    """bool ``[N]``: another advantage, or trained on one side only."""
    retrained: Tensor
    """bool ``[N]``: trained on one side only."""

    @cached_property
    def size(self) -> Tensor:
        """float64 ``[N]``: absolute change, 0 where both are no number, infinite where one is."""
        size = (self.after.values.double() - self.before.values.double()).abs()
        both = ~torch.isfinite(self.after.values) & ~torch.isfinite(self.before.values)
        return size.nan_to_num(nan=torch.inf).masked_fill(both, 0.0)

    @cached_property
    def flips(self) -> Tensor:
        """bool ``[N]``: the row is pushed the other way."""
        return self.changed & (torch.sign(self.before.values) * torch.sign(self.after.values) < 0)

    def __bool__(self) -> bool:
        return bool(self.changed.any())

    def rollouts(self) -> list[RolloutChange]:
        """Rollouts that change, the most changed first."""
        rows = torch.nonzero(self.changed)[:, 0]
        order = torch.sort(self.index.row_rollout[rows], stable=True)
        rollouts, counts = torch.unique_consecutive(order.values, return_counts=True)
        parts = rows[order.indices].split(counts.tolist())
        found = [self._change(int(rollout), part) for rollout, part in zip(rollouts, parts, strict=True)]
        return sorted(found, key=lambda change: (-change.largest, change.rollout))

    def _change(self, rollout: int, rows: Tensor) -> RolloutChange:
        before, after = self.before.values[rows], self.after.values[rows]
        return RolloutChange(
            rollout,
            tuple(rows.tolist()),
            (float(before.min()), float(before.max())),
            (float(after.min()), float(after.max())),
            float(self.size[rows].max()),
            int(self.flips[rows].sum()),
            int(self.retrained[rows].sum()),
        )


def compare_advantages(
    index: RolloutIndex, before: Advantages, after: Advantages, *, tolerance: float = 1e-6
) -> Difference:
    """Compare two rules row by row.

    A row changes where the two differ by more than ``tolerance``, times the larger magnitude where that is above 1,
    where one of them alone is a number, or where the row is trained on one side only.

    >>> from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 3, rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[4, 4, 2])
    >>> grpo, dr = (normalize_columns(columns, NormalizationConfig(advantage_estimator=e)) for e in ("grpo", "dr_grpo"))
    >>> difference = compare_advantages(grpo.index, Advantages(grpo.advantages), Advantages(dr.advantages))
    >>> [(change.rollout, change.rows, change.after) for change in difference.rollouts()]
    [(0, (0, 1), (0.5, 0.5)), (1, (2,), (-0.5, -0.5))]
    """
    a, b = before.values.double(), after.values.double()
    scale = torch.maximum(a.abs(), b.abs()).nan_to_num(nan=1.0, posinf=1.0).clamp(min=1.0)
    known = torch.isfinite(a) & torch.isfinite(b)
    changed = torch.where(known, (a - b).abs() > tolerance * scale, torch.isfinite(a) != torch.isfinite(b))
    retrained = torch.zeros_like(changed)
    if before.trained is not None and after.trained is not None:
        retrained = before.trained != after.trained
    return Difference(index, before, after, changed | retrained, retrained)
