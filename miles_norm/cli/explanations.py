"""What ``explain`` prints of rows, rollouts and prompt groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_norm.audit.details import rollout_json
from miles_norm.audit.summary import counted, label, number, summarize_groups
from miles_norm.cli.report import group_json, row_json
from miles_norm.cli.selection import check_row, find_groups, find_rollouts
from miles_norm.cli.table import Column, Note, print_table
from miles_norm.cli.terminal import show_lines
from miles_norm.explain import explain_siblings

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch
    from miles_norm.result import NormalizedRewards

__all__ = ["Selection", "explanation_json", "print_explanation", "row_names", "select"]


@dataclass(frozen=True)
class Selection:
    """What is to be explained: one row, or rollouts, or groups, by their numbers in the result."""

    row: int | None = None
    rollouts: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()


def select(result: NormalizedRewards, row: int | None, rollout: str | None, group: str | None) -> Selection:
    """Look up the one selector that is given.

    Raises:
        ConfigError: nothing has that number or id.
    """
    if row is not None:
        return Selection(row=check_row(result, row))
    if rollout is not None:
        found, remarks = find_rollouts(result, rollout)
        return Selection(rollouts=tuple(found), remarks=tuple(remarks))
    found, remarks = find_groups(result, group or "")
    return Selection(groups=tuple(found), remarks=tuple(remarks))


def print_explanation(console: Console, batch: Batch, selection: Selection) -> None:
    """Print the chain from reward to advantage for all that was selected."""
    result = batch.result
    for remark in selection.remarks:
        show_lines(console, remark, head="note: ", style="cyan")
    if selection.row is not None:
        show_lines(console, result.explain(selection.row), style="bold")
    for place, rollout in enumerate(selection.rollouts):
        if place or selection.remarks:
            console.print()
        _print_rollout(console, result, rollout)
    for place, group in enumerate(selection.groups):
        if place or selection.remarks:
            console.print()
        _print_group(console, result, group)


def _print_rollout(console: Console, result: NormalizedRewards, rollout: int) -> None:
    """What its rows have in common once, then what differs for each."""
    rows = result.index.rows_of_rollout(rollout)
    if len(rows) == 1:
        show_lines(console, result.explain(rows[0]), style="bold")
        return
    shared, own = explain_siblings(result, rows)
    name, group = result.index.rollout_ids[rollout], int(result.index.rollout_group[rollout])
    head = f"rollout {label(name)}" if name is not None else "rollout without an id"
    show_lines(console, f"{head} in prompt group {label(result.index.group_ids[group])}", style="bold")
    show_lines(console, "\n".join(shared))
    for lines in own:
        show_lines(console, "\n".join(lines), style="bold")


def _print_group(console: Console, result: NormalizedRewards, group: int) -> None:
    summary = summarize_groups(result)[group]
    rollouts = result.index.rollouts_of_group(group)
    show_lines(console, f"prompt group {summary.label}", style="bold")
    if not rollouts:
        show_lines(console, "no rollout, so there is nothing to explain")
        return
    counts = f"{counted(summary.rows, 'row')}, {counted(summary.rollouts, 'rollout')}"
    spread = f"{summary.counted} in the statistics: mean {number(summary.mean)}, std {number(summary.std)}"
    show_lines(console, "; ".join([f"{counts}, {spread}", *summary.notes]))
    columns = [
        Column("rollout", folds=True),
        Column("rows", folds=True),
        Column("fan-out"),
        Column("reward"),
        Column("advantage"),
    ]
    rows, notes = [], []
    for entry in rollout_json(result, rollouts):
        numbers = [str(entry["fan_out"]), number(entry["reward"]), _advantage_range(entry)]
        rows.append([label(entry["rollout"]), row_names(entry["rows"]), *numbers])
        notes.append(Note(", ".join(entry["notes"]), "yellow"))
    console.print()
    print_table(console, columns, rows, notes)
    console.print()
    show_lines(console, result.explain(_example(result, rollouts)), head="for example, ", style="bold")


def _example(result: NormalizedRewards, rollouts: list[int]) -> int:
    """The mainstream row of the rollout with the largest advantage, one that is trained if there is any."""
    rows: list[int] = result.mainstream_rows[rollouts].tolist()
    return max(rows, key=lambda row: (bool(result.trained_rows[row]), abs(float(result.advantages[row]))))


def row_names(rows: list[int]) -> str:
    """Rows with commas, or as ``4-9``: siblings often stand together, and that is easier to read than six numbers."""
    if len(rows) > 2 and rows == list(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]}-{rows[-1]}"
    return ", ".join(map(str, rows))


def _advantage_range(entry: dict[str, Any]) -> str:
    low, high = entry["advantage_min"], entry["advantage_max"]
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def explanation_json(batch: Batch, selection: Selection) -> dict[str, Any]:
    """The selected groups, rollouts and rows, each row with its explanation as text."""
    result = batch.result
    index = result.index
    if selection.row is not None:
        rows = [selection.row]
        rollouts = [int(index.row_rollout[selection.row])]
    else:
        rollouts = [r for group in selection.groups for r in index.rollouts_of_group(group)] or list(selection.rollouts)
        rows = [row for rollout in rollouts for row in index.rows_of_rollout(rollout)]
    groups = list(dict.fromkeys([*selection.groups, *index.rollout_group[rollouts].tolist()]))
    summaries = summarize_groups(result)
    return {
        "config": result.config.model_dump(mode="json"),
        "group_source": index.group_source,
        "groups": [group_json(summaries[group]) for group in groups],
        "rollouts": rollout_json(result, rollouts),
        "rows": [{**entry, "explanation": result.explain(entry["row"])} for entry in row_json(result, rows)],
        "remarks": list(selection.remarks),
        "warnings": batch.warnings,
    }
