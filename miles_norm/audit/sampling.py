"""What of a dump a page shows: prompt groups in full, the most notable first, and dots for an even part of rollouts."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from miles_norm.audit.details import RolloutDetails, short
from miles_norm.audit.findings.evidence import rollout_labels
from miles_norm.audit.metrics import AGGREGATIONS, Comparison, relative_weights
from miles_norm.audit.row_notes import RowNotes
from miles_norm.audit.summary import GroupSummary, label, summarize_groups
from miles_norm.loss import loss_weights
from miles_norm.result import NormalizedRewards

__all__ = ["shown_groups", "shown_points"]


def shown_groups(
    result: NormalizedRewards, notes: RowNotes, comparison: Comparison | None, most_rows: int
) -> list[dict[str, Any]]:
    """Prompt groups of about ``most_rows`` rows in all, in their order, with their rollouts.

    Groups with unusual notes come first, then those whose advantages the baseline changes most. The first one is shown
    even if it is larger, with as many rollouts as fit.
    """
    summaries = summarize_groups(result)
    rows, change, flips = _per_group(result, comparison)
    ranked = sorted(
        (summary for summary in summaries if summary.rows),
        key=lambda summary: (not summary.unusual, -flips[summary.group], -change[summary.group]),
    )
    left = most_rows
    chosen: list[GroupSummary] = []
    for summary in ranked:
        if summary.rows <= left or not chosen:
            chosen.append(summary)
            left -= summary.rows
    chosen.sort(key=lambda summary: summary.group)
    fan_out = torch.bincount(result.index.row_rollout, minlength=result.index.num_rollouts)
    rollouts = [_within(result.index.rollouts_of_group(each.group), fan_out, most_rows) for each in chosen]
    details = RolloutDetails(result, notes, comparison, loss_weights(result))
    members = iter(details.describe([rollout for part in rollouts for rollout in part]))
    return [
        {
            **_head(summary),
            "row_mean": rows[summary.group],
            "flips": flips[summary.group],
            "change": short(change[summary.group]),
            "more_rollouts": summary.rollouts - len(part),
            "members": list(islice(members, len(part))),
        }
        for summary, part in zip(chosen, rollouts, strict=True)
    ]


def _head(summary: GroupSummary) -> dict[str, Any]:
    return {
        "id": summary.label,
        "adapter": summary.adapter or "",
        "rows": summary.rows,
        "rollouts": summary.rollouts,
        "counted": summary.counted,
        "fan_out": summary.fan_out,
        "mean": None if summary.mean is None else short(summary.mean),
        "std": None if summary.std is None else short(summary.std),
        "advantages": None if summary.advantages is None else [short(value) for value in summary.advantages],
        "notes": list(summary.notes),
        "unusual": summary.unusual,
    }


def _per_group(
    result: NormalizedRewards, comparison: Comparison | None
) -> tuple[list[float | None], list[float], list[int]]:
    """Reward mean over rows, largest change against the baseline, rows of the other sign."""
    index, own = result.index, result.rewards.row_values
    groups, row_group = index.num_groups, index.row_group
    scored = torch.isfinite(own)
    if result.columns.padding is not None:
        scored &= ~result.columns.padding
    count = torch.bincount(row_group[scored], minlength=groups)
    total = own.new_zeros(groups).index_add_(0, row_group[scored], own[scored])
    means = [short(value) for value in (total / count).tolist()]
    if comparison is None:
        return means, [0.0] * groups, [0] * groups
    change = own.new_zeros(groups).scatter_reduce_(0, row_group, comparison.change.abs(), "amax")
    return means, change.tolist(), torch.bincount(row_group[comparison.flips], minlength=groups).tolist()


def _within(rollouts: list[int], fan_out: Tensor, most_rows: int) -> list[int]:
    """As many rollouts as have ``most_rows`` rows, at least one."""
    fits = int((torch.cumsum(fan_out[rollouts], 0) <= most_rows).sum())
    return rollouts[: max(fits, 1)]


def shown_points(result: NormalizedRewards, comparison: Comparison | None, most: int) -> dict[str, list[Any]]:
    """Columns over at most ``most`` counted rollouts, evenly spaced in the order of the dump."""
    index = result.index
    counted = torch.nonzero(result.counted_rollouts)[:, 0]
    if len(counted) > most:
        counted = counted[torch.arange(most, device=counted.device) * len(counted) // most]
    chosen: list[int] = counted.tolist()
    rows = result.mainstream_rows[counted]
    real = index.row_rollout if result.columns.padding is None else index.row_rollout[~result.columns.padding]
    points: dict[str, list[Any]] = {
        "rollout": rollout_labels(result, chosen),
        "group": [label(index.group_ids[group]) for group in index.rollout_group[counted].tolist()],
        "fan_out": torch.bincount(real, minlength=index.num_rollouts)[counted].tolist(),
        "reward": [short(value) for value in result.rollout_rewards[counted].tolist()],
        "advantage": [short(value) for value in result.advantages[rows].tolist()],
    }
    points["baseline"] = [None] * len(chosen)
    points["flips"] = [0] * len(chosen)
    if comparison is not None:
        points["baseline"] = [short(value) for value in comparison.theirs[rows].tolist()]
        points["flips"] = comparison.flips[rows].int().tolist()
    for aggregation in AGGREGATIONS:
        weights = relative_weights(result, aggregation)[counted].tolist()
        points[f"weight/{aggregation}"] = [short(value) for value in weights]
    return points
