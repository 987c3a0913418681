"""Reward components that are normalized one by one: those of the row that speaks, and their group statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.errors import RewardError, format_rows
from miles_norm.grouping import RolloutIndex
from miles_norm.rewards import FLOAT32_MAX, RolloutRewards, read_components, scored_rows
from miles_norm.statistics import SegmentStatistics, counts_of, segment_statistics

__all__ = ["group_components"]


def group_components(
    columns: RolloutColumns,
    rewards: RolloutRewards,
    index: RolloutIndex,
    members: Tensor | None,
    config: NormalizationConfig,
    largest: int,
) -> dict[str, tuple[Tensor, SegmentStatistics]]:
    """Per component float64 ``[R]``, and its statistics over the ``members`` of each group that have it.

    No group has more than ``largest`` members.

    Empty for estimators other than ``gdpo``. Under ``missing_reward="zero"`` an unscored row has 0 in each.

    Raises:
        RewardError: no such column, a component that is infinite or too large, or, unless ``gdpo_partial``, one that a
            scored row lacks; all rows are named.
    """
    if config.advantage_estimator != "gdpo" or not config.normalizes_groups or rewards.speaker is None:
        return {}
    scored = scored_rows(columns)
    _check(columns, scored if columns.padding is None else scored & ~columns.padding, config)
    read = read_components(columns, config)
    components = {}
    for name in config.options.gdpo_components:
        component = read[name][rewards.speaker]
        order = torch.arange(len(component), device=component.device) if members is None else members
        order = order[~torch.isnan(component[order])]
        count = counts_of(index.rollout_group[order], index.num_groups)
        statistics = segment_statistics(
            component[order], count, ddof=config.std_ddof, tolerance=config.zero_std_tolerance, longest=largest
        )
        components[name] = (component, statistics)
    return components


def _check(columns: RolloutColumns, scored: Tensor, config: NormalizationConfig) -> None:
    given = columns.components or {}
    absent = [name for name in config.options.gdpo_components if name not in given]
    if absent:
        raise _unusable(f"{', '.join(given) or 'none'}, without {', '.join(absent)}", config, ())
    found: dict[str, list[int]] = {}
    for name in config.options.gdpo_components:
        bad = given[name].abs() > FLOAT32_MAX
        if not config.options.gdpo_partial:
            bad = bad | torch.isnan(given[name])
        found[name] = torch.nonzero(bad & scored)[:, 0].tolist()
    all_rows = sorted({row for rows in found.values() for row in rows})
    if all_rows:
        described = [
            f"{name} is {', '.join(f'{float(given[name][row]):g}' for row in rows[:10])} in {format_rows(rows)}"
            for name, rows in found.items()
            if rows
        ]
        raise _unusable("; ".join(described), config, all_rows)


def _unusable(got: str, config: NormalizationConfig, rows: Sequence[int]) -> RewardError:
    return RewardError(
        "reward components",
        got=got,
        expected=f"a finite number for each of {', '.join(config.options.gdpo_components)} on every scored row",
        reason="gdpo normalizes each component over the rollouts of the group",
        remedy="pass them as components=; options.gdpo_partial lets a lacking one (NaN) add nothing",
        rows=rows,
    )
