"""What ``normalize`` prints: a table for people, one JSON object for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_norm.audit.summary import (
    GroupSummary,
    json_id,
    number,
    select_notable,
    summarize_groups,
)
from miles_norm.cli.header import print_header
from miles_norm.cli.table import Column, Note, print_table
from miles_norm.cli.terminal import show_lines, show_warnings
from miles_norm.cli.totals import print_totals

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch
    from miles_norm.result import NormalizedRewards

__all__ = ["group_json", "print_report", "report_json", "row_json"]

TABLE_LIMIT = 40
"""Groups in the table unless all are asked for."""

WIDE = 100
"""Columns of a terminal that has room for undivided headers beside the notes."""


def print_report(console: Console, batch: Batch, *, show_all: bool) -> None:
    """Print header, table of prompt groups, totals and warnings."""
    summaries = summarize_groups(batch.result)
    shown = summaries if show_all else select_notable(summaries, TABLE_LIMIT)
    print_header(console, batch, summaries)
    console.print()
    _print_groups(console, shown)
    if len(shown) < len(summaries):
        text = (
            f"{len(shown)} of {len(summaries)} groups, in the order of the dump: those with unusual notes were chosen "
            "first, then those with the largest advantages; --all shows every group"
        )
        show_lines(console, text)
    console.print()
    print_totals(console, batch.result, empty=sum(summary.rollouts == 0 for summary in summaries))
    if batch.warnings:
        console.print()
    show_warnings(console, batch.warnings)


def _print_groups(console: Console, summaries: list[GroupSummary]) -> None:
    adapters = any(summary.adapter for summary in summaries)
    one_line, two_lines = [Column("rollouts"), Column("fan-out")], [Column("outs", "roll-"), Column("out", "fan-")]
    columns = [
        Column("group", folds=True),
        *([Column("adapter", folds=True)] if adapters else []),
        Column("rows"),
        *(two_lines if console.width < WIDE else one_line),
        Column("mean", "reward"),
        Column("std"),
        Column("min", "advantage"),
        Column("max"),
    ]
    rows, notes = [], []
    for summary in summaries:
        low, high = summary.advantages or (None, None)
        names = [summary.label, summary.adapter or ""] if adapters else [summary.label]
        counts = [str(summary.rows), str(summary.rollouts), _fan_out(summary.fan_out)]
        rows.append([*names, *counts, *(number(value) for value in (summary.mean, summary.std, low, high))])
        notes.append(Note(", ".join(summary.notes), "yellow" if summary.unusual else "dim"))
    print_table(console, columns, rows, notes)


def _fan_out(extremes: tuple[int, int] | None) -> str:
    if extremes is None:
        return "-"
    low, high = extremes
    return str(low) if low == high else f"{low}-{high}"


def report_json(batch: Batch) -> dict[str, Any]:
    """Config, groups, metrics, warnings and every row."""
    result = batch.result
    return {
        "config": result.config.model_dump(mode="json"),
        "group_source": result.index.group_source,
        "groups": [group_json(summary) for summary in summarize_groups(result)],
        "metrics": result.metrics(),
        "warnings": batch.warnings,
        "rows": row_json(result, range(result.index.num_rows)),
    }


def group_json(summary: GroupSummary) -> dict[str, Any]:
    """One prompt group; ``group`` is its id."""
    fan_out, advantages = summary.fan_out or (None, None), summary.advantages or (None, None)
    return {
        "group": json_id(summary.id),
        "rows": summary.rows,
        "rollouts": summary.rollouts,
        "counted_rollouts": summary.counted,
        "fan_out_min": fan_out[0],
        "fan_out_max": fan_out[1],
        "reward_mean": summary.mean,
        "reward_std": summary.std,
        "advantage_min": advantages[0],
        "advantage_max": advantages[1],
        "notes": list(summary.notes),
    }


def row_json(result: NormalizedRewards, rows: range | list[int]) -> list[dict[str, Any]]:
    """One object per row: ``reward`` is its own, ``rollout_reward`` the one that speaks for its rollout."""
    index = result.index
    rollout_of, group_of = index.row_rollout.tolist(), index.row_group.tolist()
    groups, rollouts = index.group_ids, index.rollout_ids
    advantages, trained = result.advantages.tolist(), result.trained_rows.tolist()
    own, speaking = result.raw_rewards.tolist(), result.rollout_rewards.tolist()
    return [
        {
            "row": row,
            "group": json_id(groups[group_of[row]]),
            "rollout": json_id(rollouts[rollout_of[row]]),
            "advantage": advantages[row],
            "trained": trained[row],
            "reward": own[row],
            "rollout_reward": speaking[rollout_of[row]],
        }
        for row in rows
    ]
