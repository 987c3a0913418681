"""What checks look at, and what they find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_norm.audit.metrics import Comparison
from miles_norm.audit.row_notes import RowNotes
from miles_norm.audit.summary import label
from miles_norm.errors import MilesNormError
from miles_norm.result import NormalizedRewards

__all__ = ["Evidence", "Finding", "group_labels", "real_rows", "rollout_labels", "where"]

KEPT = 200
"""Rows and groups that a finding carries; it says how many there are."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a dump, or with what would be computed from it."""

    name: str
    problem: str
    """What is wrong, in a sentence that names the rows or groups."""
    remedy: str
    """Which setting or field mends it."""
    rows: tuple[int, ...] = ()
    """Rows concerned, the first 200 of them, in flattened order."""
    groups: tuple[str, ...] = ()
    """Ids of the prompt groups concerned, likewise."""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}\n  remedy: {self.remedy}"


@dataclass(frozen=True)
class Evidence:
    """A normalized dump, and what was noted on the way."""

    result: NormalizedRewards
    baseline: str = "rows"
    comparison: Comparison | None = None
    """Advantages against the baseline; None where the baseline refused the rows."""
    baseline_error: MilesNormError | None = None
    notes: RowNotes = field(default_factory=RowNotes)
    """Empty where the rows were not read here."""
    refused: tuple[MilesNormError, ...] = ()
    """What normalization stopped with before a setting was relaxed, so that the audit could go on."""

    def finding(
        self, name: str, problem: str, remedy: str, *, rows: Iterable[int] = (), groups: Iterable[int] = ()
    ) -> Finding:
        """A finding about rows and groups of this result, by their numbers."""
        kept = tuple(group_labels(self.result, list(groups)[:KEPT]))
        problem = problem[:1].upper() + problem[1:]
        return Finding(name, problem, remedy, tuple(list(rows)[:KEPT]), kept)


def where(flags: Tensor) -> list[int]:
    """Positions that are set."""
    positions: list[int] = torch.nonzero(flags)[:, 0].tolist()
    return positions


def real_rows(result: NormalizedRewards) -> Tensor:
    """bool ``[N]``: rows that are no padding."""
    padding = result.columns.padding
    return torch.ones_like(result.trained_rows) if padding is None else ~padding


def group_labels(result: NormalizedRewards, groups: list[int]) -> list[str]:
    """Ids of prompt groups as a table shows them."""
    ids = result.index.group_ids
    return [label(ids[group]) for group in groups]


def rollout_labels(result: NormalizedRewards, rollouts: list[int]) -> list[str]:
    """Ids of rollouts; one without an id is named by its row."""
    index = result.index
    column = index.rollout_column
    rows = index.first_row[rollouts]
    ids = [None] * len(rollouts) if column is None else column.labels_at(rows)
    return [f"of row {row}" if name is None else label(name) for row, name in zip(rows.tolist(), ids, strict=True)]
