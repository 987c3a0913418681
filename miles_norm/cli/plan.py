"""What ``plan`` prints: the updates of a batch, what each weighs, and what is in none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_norm.audit.summary import counted, json_id, label, number
from miles_norm.cli.table import Column, Note, print_table
from miles_norm.cli.terminal import show_lines
from miles_norm.config import LossConfig, UpdateConfig
from miles_norm.errors import format_rows
from miles_norm.loss import UpdatePlan, plan_updates, update_masses

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch

__all__ = ["plan_json", "print_plan", "update_config"]


@dataclass(frozen=True)
class _Update:
    rows: list[int]
    rollouts: int
    tokens: int
    by_rollouts: float
    """Mass under ``rollout_mean``."""
    by_rows: float
    """Mass under ``rollout_mean`` with ``divisor="trained_rows"``."""


def update_config(**given: Any) -> UpdateConfig:
    """The settings of the options that were given; the others keep their defaults.

    Raises:
        ConfigError: options that contradict each other, or a value that does not exist.
    """
    return UpdateConfig(**{name: value for name, value in given.items() if value is not None})


def print_plan(console: Console, batch: Batch, config: UpdateConfig) -> None:
    """Print one line per update, their sum, and what is in no update."""
    plan = plan_updates(batch.result, config)
    updates = _updates(plan)
    index = batch.result.index
    counted_rollouts = int(batch.result.counted_rollouts.sum())
    show_lines(console, str(batch.path), style="bold")
    counts = f"{counted(index.num_rows, 'row')}, {counted(index.num_rollouts, 'rollout')}, {counted_rollouts} counted"
    show_lines(console, counts)
    show_lines(console, f"{_rule(config)}: {counted(plan.num_updates, 'update')}")
    console.print()
    columns = [
        Column("update", folds=True),
        *(Column(name) for name in ("rollouts", "rows", "tokens")),
        Column("rollouts", "mass by"),
        Column("trained rows"),
    ]
    lines = [_cells(str(n), update) for n, update in enumerate(updates)]
    print_table(console, columns, [*lines, _cells("epoch", _epoch(plan, updates))], [Note()] * (len(lines) + 1))
    console.print()
    show_lines(console, "\n".join(f"{name + ':':<16} {text}" for name, text in _in_no_update(plan)))


def plan_json(batch: Batch, config: UpdateConfig) -> dict[str, Any]:
    """The plan, its masses, and what is in no update."""
    plan = plan_updates(batch.result, config)
    updates = _updates(plan)
    epoch = _epoch(plan, updates)
    return {
        "config": config.model_dump(mode="json"),
        "num_updates": plan.num_updates,
        "updates": [
            {
                "rows": update.rows,
                "rollouts": update.rollouts,
                "trainable_tokens": update.tokens,
                "mass": update.by_rollouts,
                "mass_by_trained_rows": update.by_rows,
            }
            for update in updates
        ],
        "epoch_mass": epoch.by_rollouts,
        "epoch_mass_by_trained_rows": epoch.by_rows,
        "dropped_rollouts": _ids(plan, plan.dropped_rollouts),
        "partly_dropped_rollouts": _ids(plan, plan.partly_dropped_rollouts),
        "carried_rollouts": _ids(plan, plan.carried_rollouts),
        "dropped_rows": _dropped_rows(plan),
        "warnings": batch.warnings,
    }


def _updates(plan: UpdatePlan) -> list[_Update]:
    masses = [update_masses(plan, loss).tolist() for loss in (LossConfig(), LossConfig(divisor="trained_rows"))]
    rollout, tokens = plan.result.index.row_rollout, plan.result.trainable_tokens
    return [
        _Update(rows, len(set(rollout[rows].tolist())), int(tokens[rows].sum()), by_rollouts, by_rows)
        for rows, by_rollouts, by_rows in zip(plan.updates, *masses, strict=True)
    ]


def _epoch(plan: UpdatePlan, updates: list[_Update]) -> _Update:
    rows = [row for update in updates for row in update.rows]
    return _Update(
        rows,
        len(set(plan.result.index.row_rollout[rows].tolist())),
        sum(update.tokens for update in updates),
        sum(update.by_rollouts for update in updates),
        sum(update.by_rows for update in updates),
    )


def _cells(name: str, update: _Update) -> list[str]:
    counts = [str(count) for count in (update.rollouts, len(update.rows), update.tokens)]
    return [name, *counts, number(update.by_rollouts), number(update.by_rows)]


def _rule(config: UpdateConfig) -> str:
    if config.unit == "rows":
        cap = "" if config.max_updates is None else f", at most {counted(config.max_updates, 'update')}"
        return f"{counted(config.rows_per_update or 0, 'row')} per update{cap}"
    if config.rollouts_per_update is None:
        return "all rollouts in one update"
    return f"{counted(config.rollouts_per_update, 'rollout')} per update, leftover {config.leftover}"


def _in_no_update(plan: UpdatePlan) -> list[tuple[str, str]]:
    rows = _dropped_rows(plan)
    named = {
        "dropped whole": plan.dropped_rollouts,
        "dropped in part": plan.partly_dropped_rollouts,
        "carried": plan.carried_rollouts,
    }
    ids = plan.result.index.rollout_ids
    lines = [
        (name, format_rows([label(ids[r]) for r in rollouts], "rollout") if rollouts else "nothing")
        for name, rollouts in named.items()
        if rollouts or name != "carried"
    ]
    return [*lines, ("rows dropped", f"{len(rows)}{f' ({format_rows(rows)})' if rows else ''}")]


def _dropped_rows(plan: UpdatePlan) -> list[int]:
    """Rows that the plan takes from training: of dropped rollouts, and the lost ones of others."""
    rollouts = {*plan.dropped_rollouts, *plan.partly_dropped_rollouts}
    index, padding = plan.result.index, plan.result.columns.padding
    out = plan.row_update < 0
    if padding is not None:
        out = out & ~padding
    rows = zip(index.row_rollout.tolist(), out.tolist(), strict=True)
    return [row for row, (rollout, is_out) in enumerate(rows) if is_out and rollout in rollouts]


def _ids(plan: UpdatePlan, rollouts: list[int]) -> list[Any]:
    return [json_id(plan.result.index.rollout_ids[rollout]) for rollout in rollouts]
