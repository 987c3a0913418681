"""Which rollouts count: enter the statistics and the denominators of the loss."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from miles_norm.columns.host import host_numbers
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.components import group_components
from miles_norm.config import NormalizationConfig
from miles_norm.grouping import RolloutIndex
from miles_norm.rewards import RolloutRewards, any_row
from miles_norm.statistics import SegmentStatistics, counts_of, segment_statistics

__all__ = ["Exclusion", "GroupedRewards", "group_rewards"]


class Exclusion(IntEnum):
    """Why a rollout does not count; the first reason that applies."""

    COUNTED = 0
    PADDING = 1
    """All its rows are padding."""
    UNSCORED = 2
    """No row that may speak has a reward."""
    UNTRAINED = 3
    """It has no trainable token, under ``untrained_rollouts="exclude"``."""
    SMALL_GROUP = 4
    """Its group has fewer counted rollouts than ``min_group_size``."""
    ZERO_VARIANCE = 5
    """All rewards of its group are equal, under ``zero_variance_groups="drop_from_loss"`` or by a filter."""
    TRUNCATED = 6
    """A row of it ended by length; dropped by a filter."""
    UNSCORED_GROUP = 7
    """A rollout of its group is unscored; dropped by a filter."""
    INCOMPLETE_GROUP = 8
    """Its group has fewer rollouts than ``n_samples_per_prompt``; dropped by a filter."""


class GroupedRewards:
    """Group statistics over counted rollouts, and why the others do not count.

    ``exclusion`` is an int8 tensor ``[R]`` of ``Exclusion`` values, None while every rollout counts. Rollouts dropped
    for zero variance are in ``statistics``, which describe what was collected; the other excluded ones are not.
    """

    def __init__(self, index: RolloutIndex) -> None:
        self.index = index
        self.exclusion: Tensor | None = None
        self.members: Tensor | None = None
        self.statistics: SegmentStatistics
        self.components: dict[str, tuple[Tensor, SegmentStatistics]] = {}
        """Per reward component float64 ``[R]`` and its group statistics; empty unless components are normalized."""
        self.without_signal: Tensor
        """bool ``[G]``: all counted rewards of the group are equal, or it has one whose advantage is 0 by rule."""

    @property
    def counted(self) -> Tensor | None:
        """bool ``[R]``; None if every rollout counts."""
        return None if self.exclusion is None else self.exclusion == Exclusion.COUNTED

    def exclude(self, rollouts: Tensor, reason: Exclusion) -> None:
        """Exclude the rollouts of a bool ``[R]`` that still count."""
        if not bool(rollouts.any()):
            return
        if self.exclusion is None:
            self.exclusion = torch.zeros(len(rollouts), dtype=torch.int8, device=rollouts.device)
        self.exclusion.masked_fill_(rollouts & (self.exclusion == Exclusion.COUNTED), int(reason))


def group_rewards(
    columns: RolloutColumns, index: RolloutIndex, rewards: RolloutRewards, config: NormalizationConfig
) -> GroupedRewards:
    """Decide which rollouts count and compute the statistics of every prompt group over them."""
    grouped = GroupedRewards(index)
    if rewards.real is not None:
        grouped.exclude(~rewards.real, Exclusion.PADDING)
    if rewards.scored is not None or rewards.real is not None:
        grouped.exclude(torch.isnan(rewards.values), Exclusion.UNSCORED)
    if config.untrained_rollouts == "exclude":
        grouped.exclude(~any_row(rewards.row_tokens > 0, index), Exclusion.UNTRAINED)
    chosen, count = _members(grouped)
    if config.min_group_size > 1:
        small = count < config.min_group_size
        grouped.exclude(small[index.rollout_group], Exclusion.SMALL_GROUP)
        chosen, count = _members(grouped)
    grouped.members = chosen
    values = rewards.values if chosen is None else rewards.values[chosen]
    (largest,) = host_numbers(count.max()) if len(count) else (0,)
    grouped.statistics = segment_statistics(
        values, count, ddof=config.std_ddof, tolerance=config.zero_std_tolerance, longest=largest
    )
    grouped.components = group_components(columns, rewards, index, grouped.members, config, largest)
    grouped.without_signal = _without_signal(grouped, config)
    if config.zero_variance_groups == "drop_from_loss":
        grouped.exclude(grouped.without_signal[index.rollout_group], Exclusion.ZERO_VARIANCE)
    return grouped


def _without_signal(grouped: GroupedRewards, config: NormalizationConfig) -> Tensor:
    """bool ``[G]``: all rewards are equal; where components are normalized on their own, each of them is.

    A group of one is left out where its reward is passed on.
    """
    silent = grouped.statistics.equal
    if grouped.components:
        silent = torch.stack([statistics.equal for _, statistics in grouped.components.values()]).all(dim=0)
    if not config.normalizes_groups or config.singleton == "raw":
        silent = silent & (grouped.statistics.count > 1)
    return silent


def _members(grouped: GroupedRewards) -> tuple[Tensor | None, Tensor]:
    """Counted rollouts group after group (None: all, as they stand), and how many each group has."""
    index, counted = grouped.index, grouped.counted
    order = index.rollouts_by_group
    if counted is not None:
        order = torch.nonzero(counted)[:, 0] if order is None else order[counted[order]]
    members = index.rollout_group if order is None else index.rollout_group[order]
    return order, counts_of(members, index.num_groups)
