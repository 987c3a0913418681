"""What normalization found, every step's result kept so that it can be explained."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from miles_norm.broadcast import rollouts_to_rows, rows_to_tokens
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.counting import Exclusion, GroupedRewards
from miles_norm.explain import explain_row
from miles_norm.grouping import RolloutIndex
from miles_norm.metrics import result_metrics
from miles_norm.rewards import RolloutRewards
from miles_norm.statistics import SegmentStatistics

__all__ = ["Advantages", "NormalizedRewards"]


@dataclass(frozen=True, eq=False)
class Advantages:
    """What the estimator gave."""

    rollouts: Tensor
    """float32 ``[R]``."""
    whitening: tuple[float, float] | None
    """Mean and deviation over the batch."""


class NormalizedRewards:
    """What ``normalize_rewards`` found: advantages per row and rollout, and every step on the way to them.

    N rows, R rollouts, G prompt groups; rows are in flattened order.
    """

    def __init__(
        self,
        columns: RolloutColumns,
        config: NormalizationConfig,
        rewards: RolloutRewards,
        grouped: GroupedRewards,
        advantages: Advantages,
        warnings: tuple[str, ...],
    ) -> None:
        self.columns = columns
        self.config = config
        self.rewards = rewards
        """Which reward speaks for each rollout, and the row values it was chosen from."""
        self.exclusion: Tensor | None = grouped.exclusion
        """int8 ``[R]``: an ``Exclusion`` per rollout; None if every rollout counts."""
        self.without_signal: Tensor = grouped.without_signal
        """bool ``[G]``: the group's rewards are all equal, so that its advantages are 0."""
        self.statistics: SegmentStatistics = grouped.statistics
        """Statistics of the ``[G]`` prompt groups over their counted rollouts."""
        self.index: RolloutIndex = grouped.index
        """Row to rollout, rollout to group, and what formed the groups."""
        self.rollout_advantages = advantages.rollouts
        """float32 ``[R]``; 0 for a rollout that does not count."""
        self.whitening = advantages.whitening
        """Mean and deviation that whitening over the batch took; None where there was none."""
        self.warnings = warnings
        """What deserves a look: guessed groups, siblings that disagree, ids used twice, groups nearly equal."""

    @cached_property
    def advantages(self) -> Tensor:
        """float32 ``[N]``: each row's advantage, that of its rollout; its own reward where rewards pass through."""
        broadcast = rollouts_to_rows(self.rollout_advantages, self.index.row_rollout)
        if self.config.normalizes_groups:
            return broadcast
        own = torch.nan_to_num(self.rewards.row_values, nan=0.0).to(torch.float32)
        if self.exclusion is not None:
            own.masked_fill_(~self._row_counts, 0.0)
        return own if self.columns.padding is None else torch.where(self.columns.padding, broadcast, own)

    @property
    def raw_rewards(self) -> Tensor:
        """float64 ``[N]``: rewards as given, NaN for None."""
        scored = self.columns.scored
        return self.columns.reward if scored is None else self.columns.reward.masked_fill(~scored, torch.nan)

    @property
    def rollout_rewards(self) -> Tensor:
        """float64 ``[R]``: the reward that speaks for each rollout, NaN where none can."""
        return self.rewards.values

    @property
    def groups(self) -> list[list[int]]:
        """Rows of each prompt group."""
        return self.index.groups

    @property
    def mainstream_rows(self) -> Tensor:
        """int64 ``[R]``: the sibling with the most trainable tokens, the first one on a tie."""
        return self.rewards.mainstream

    @cached_property
    def trainable_tokens(self) -> Tensor:
        """int64 ``[N]``: sum of each row's loss mask; 0 for removed, padding, untrained and excluded rows."""
        tokens = self.rewards.row_tokens
        if self.exclusion is not None:
            tokens = tokens.masked_fill(~self._row_counts, 0)
        if not self.config.normalizes_groups and self.rewards.scored is not None:
            tokens = tokens.masked_fill(~self.rewards.scored, 0)
        return tokens

    @cached_property
    def trained_rows(self) -> Tensor:
        """bool ``[N]``: the row has a trainable token."""
        return self.trainable_tokens > 0

    @cached_property
    def counted_rollouts(self) -> Tensor:
        """bool ``[R]``: the rollout enters statistics and denominators."""
        if self.exclusion is None:
            return torch.ones(self.index.num_rollouts, dtype=torch.bool, device=self.columns.reward.device)
        return self.exclusion == Exclusion.COUNTED

    @property
    def _row_counts(self) -> Tensor:
        return self.counted_rollouts[self.index.row_rollout]

    @cached_property
    def incomplete_groups(self) -> list[int]:
        """Prompt groups with fewer rollouts than ``n_samples_per_prompt``, padding aside; empty where that is unset."""
        if self.config.n_samples_per_prompt is None:
            return []
        group = self.index.rollout_group if self.rewards.real is None else self.index.rollout_group[self.rewards.real]
        count = torch.bincount(group, minlength=self.index.num_groups)
        few = count < self.config.n_samples_per_prompt
        if self.index.group_source not in ("prompt_group_sizes", "nesting"):
            few &= count > 0  # rows that are all padding are no group of anything
        groups: list[int] = torch.nonzero(few)[:, 0].tolist()
        return groups

    def with_exclusion(self, exclusion: Tensor) -> NormalizedRewards:
        """The same result with other rollouts excluded from the loss; int8 ``[R]`` of ``Exclusion`` values.

        Statistics and the advantages of all other rollouts stay as they are.
        """
        changed = copy.copy(self)
        for name, member in vars(NormalizedRewards).items():
            if isinstance(member, cached_property):
                changed.__dict__.pop(name, None)
        changed.exclusion = exclusion
        changed.rollout_advantages = self.rollout_advantages.masked_fill(exclusion != Exclusion.COUNTED, 0.0)
        return changed

    def metrics(self) -> dict[str, float]:
        """Flat numbers for a training log, per rollout where a name does not say row."""
        return result_metrics(self)

    def explain(self, row: int) -> str:
        """Why a row got its advantage: the rule that formed its group, who spoke for its rollout, and the arithmetic.

        Raises:
            NoSuchRowError: no such row.
        """
        return explain_row(self, row)

    def token_advantages(self, masks: Tensor | Sequence[Any]) -> Tensor | list[Tensor]:
        """Each row's advantage on its own trainable tokens, 0 elsewhere; all 0 for rows that are not trained.

        Args:
            masks: Loss masks: one padded tensor ``[N, T]``, or N ragged lists, arrays or tensors.

        Returns:
            float32 ``[N, T]``, or a list of N tensors.
        """
        return rows_to_tokens(self.advantages.masked_fill(~self.trained_rows, 0.0), masks)

    def __repr__(self) -> str:
        index = self.index
        return (
            f"NormalizedRewards({index.num_rows} rows, {index.num_rollouts} rollouts, {index.num_groups} groups by "
            f"{index.group_source}, {len(self.warnings)} warnings)"
        )
