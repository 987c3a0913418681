"""Filters between normalization and loss: whole rollouts leave the loss, and a report says which and why."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.config import FilterConfig
from miles_norm.counting import Exclusion
from miles_norm.errors import ConfigError
from miles_norm.result import NormalizedRewards
from miles_norm.rewards import any_row

__all__ = ["DroppedRollout", "FilterReport", "filter_rollouts"]


@dataclass(frozen=True)
class DroppedRollout:
    """A rollout that a filter took out of the loss."""

    rollout: int
    """Its number, 0 to R - 1."""
    rollout_id: Hashable
    """Its id as given; None for a row without one."""
    group_id: Hashable
    reason: Exclusion


@dataclass(frozen=True)
class FilterReport:
    """What was dropped and why."""

    dropped: tuple[DroppedRollout, ...]
    kept_rollouts: int
    """Counted rollouts that are left."""

    @property
    def counts(self) -> dict[str, int]:
        """Dropped rollouts per reason, reasons that dropped none left out."""
        reasons = [entry.reason.name.lower() for entry in self.dropped]
        return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in self.counts.items())
        return f"{len(self.dropped)} rollouts dropped ({why or 'none'}), {self.kept_rollouts} kept"


def filter_rollouts(result: NormalizedRewards, config: FilterConfig) -> tuple[NormalizedRewards, FilterReport]:
    """Take rollouts out of the loss, always whole ones and after their group was normalized with them.

    Why afterwards: dropping first would change the baseline of the siblings that stay. A dropped rollout enters no
    denominator, has advantage 0 and trains nothing; the statistics, and the advantages of all others, keep every bit.

    Returns:
        A result with the same rows, whose weights and counts follow, and the report. ``result`` is not changed.

    Raises:
        ConfigError: another type than FilterConfig, or ``incomplete_groups`` without ``n_samples_per_prompt``.

    >>> from miles_norm import normalize_rewards
    >>> rows = [{"group_index": i // 2, "rollout_id": i, "reward": r, "response_length": 1}
    ...         for i, r in enumerate((1.0, 0.0, 1.0, 1.0))]
    >>> kept, report = filter_rollouts(normalize_rewards(rows), FilterConfig(zero_variance_groups=True))
    >>> print(report)
    2 rollouts dropped (2 zero variance), 2 kept
    >>> kept.counted_rollouts.tolist()
    [True, True, False, False]
    """
    config = FilterConfig.checked(config)
    exclusion = torch.zeros_like(result.counted_rollouts, dtype=torch.int8)
    if result.exclusion is not None:
        exclusion = result.exclusion.clone()
    already = exclusion != Exclusion.COUNTED
    for wanted, reason, rollouts in (
        (config.zero_variance_groups, Exclusion.ZERO_VARIANCE, _zero_variance),
        (config.truncated_rollouts, Exclusion.TRUNCATED, _truncated),
        (config.unscored_groups, Exclusion.UNSCORED_GROUP, _in_unscored_groups),
        (config.incomplete_groups, Exclusion.INCOMPLETE_GROUP, _in_incomplete_groups),
    ):
        if wanted:
            exclusion.masked_fill_(rollouts(result) & (exclusion == Exclusion.COUNTED), int(reason))
    gone = torch.nonzero((exclusion != Exclusion.COUNTED) & ~already)[:, 0].tolist()
    index = result.index
    dropped = tuple(
        DroppedRollout(
            rollout,
            index.rollout_ids[rollout],
            index.group_ids[int(index.rollout_group[rollout])],
            Exclusion(int(exclusion[rollout])),
        )
        for rollout in gone
    )
    report = FilterReport(dropped, int((exclusion == Exclusion.COUNTED).sum()))
    return (result.with_exclusion(exclusion) if dropped else result), report


def _zero_variance(result: NormalizedRewards) -> Tensor:
    return result.without_signal[result.index.rollout_group]


def _truncated(result: NormalizedRewards) -> Tensor:
    columns = result.columns
    if columns.truncated is None:
        return torch.zeros_like(result.counted_rollouts)
    truncated = columns.truncated if columns.padding is None else columns.truncated & ~columns.padding
    return any_row(truncated, result.index)


def _in_unscored_groups(result: NormalizedRewards) -> Tensor:
    real = torch.ones_like(result.counted_rollouts) if result.rewards.real is None else result.rewards.real
    return _same_group(result, real & torch.isnan(result.rollout_rewards))


def _in_incomplete_groups(result: NormalizedRewards) -> Tensor:
    if result.config.n_samples_per_prompt is None:
        raise ConfigError(
            "FilterConfig",
            got="incomplete_groups=True without n_samples_per_prompt",
            expected="the size of a complete group in the NormalizationConfig of the result",
            reason="a group is incomplete when it has fewer rollouts than were to be sampled",
            remedy="set n_samples_per_prompt",
        )
    incomplete = torch.zeros(result.index.num_groups, dtype=torch.bool, device=result.index.row_rollout.device)
    incomplete[result.incomplete_groups] = True
    return incomplete[result.index.rollout_group]


def _same_group(result: NormalizedRewards, rollouts: Tensor) -> Tensor:
    """bool ``[R]``: a rollout of the same group is among ``rollouts``."""
    group = result.index.rollout_group
    found = torch.zeros(result.index.num_groups, dtype=torch.bool, device=group.device)
    found[group[rollouts]] = True
    return found[group]
