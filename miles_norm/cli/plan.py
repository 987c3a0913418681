"""What ``plan`` prints: the updates of a batch, what each weighs, and what is in none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_norm.audit.summary import counted, json_id, label, number
from miles_norm.cli.inputs import kept_warnings, reading
from miles_norm.cli.table import Column, Note, print_table
from miles_norm.cli.terminal import show_lines
from miles_norm.columns.row_values import row_length
from miles_norm.config import LossConfig, UpdateConfig
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss import UpdatePlan, plan_updates, update_masses

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch

__all__ = ["plan_json", "print_plan", "update_config"]


@dataclass(frozen=True)
class _Update:
    rows: list[int]
    rollouts: int
    tokens: int
    micro_batches: list[list[int]] | None
    """Rows of each; None without a budget of tokens."""
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
    updates = _updates(plan, batch.path)
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
        *([] if config.max_tokens_per_gpu is None else [Column("batches", "micro-")]),
        Column("rollouts", "mass by"),
        Column("trained rows"),
    ]
    lines = [_cells(str(n), update) for n, update in enumerate(updates)]
    print_table(console, columns, [*lines, _cells("epoch", _epoch(plan, updates))], [Note()] * (len(lines) + 1))
    console.print()
    show_lines(console, "\n".join(f"{name + ':':<16} {text}" for name, text in _in_no_update(plan, batch)))


def plan_json(batch: Batch, config: UpdateConfig) -> dict[str, Any]:
    """The plan, its masses, and what is in no update."""
    plan = plan_updates(batch.result, config)
    updates = _updates(plan, batch.path)
    epoch = _epoch(plan, updates)
    return {
        "config": config.model_dump(mode="json"),
        "num_updates": plan.num_updates,
        "updates": [
            {
                "rows": update.rows,
                "rollouts": update.rollouts,
                "trainable_tokens": update.tokens,
                **({} if update.micro_batches is None else {"micro_batches": update.micro_batches}),
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
        "dropped_rows": _dropped_rows(plan, batch),
        "warnings": batch.warnings,
    }


def _updates(plan: UpdatePlan, path: Path) -> list[_Update]:
    micro_batches: Sequence[list[list[int]] | None] = [None] * plan.num_updates
    if plan.config.max_tokens_per_gpu is not None:
        micro_batches = plan.micro_batches(_row_lengths(plan, path))
    masses = [update_masses(plan, loss).tolist() for loss in (LossConfig(), LossConfig(divisor="trained_rows"))]
    rollout, tokens = plan.result.index.row_rollout, plan.result.trainable_tokens
    return [
        _Update(rows, len(set(rollout[rows].tolist())), int(tokens[rows].sum()), batches, by_rollouts, by_rows)
        for rows, batches, by_rollouts, by_rows in zip(plan.updates, micro_batches, *masses, strict=True)
    ]


def _row_lengths(plan: UpdatePlan, path: Path) -> list[int]:
    """Tokens of each row, prompt and response; 0 for rows without any that are in no update."""
    with kept_warnings(), reading(path) as stream:
        lengths = [row_length(row.get("tokens")) for row in stream.rows]
    lacking = [row for rows in plan.updates for row in rows if lengths[row] is None]
    if lacking:
        raise SampleError(
            f"tokens of {format_rows(sorted(lacking))}",
            got="none",
            expected="prompt and response of every row in an update",
            reason="max_tokens_per_gpu bounds the tokens of a micro-batch, prompts included",
            remedy="leave --max-tokens-per-gpu out, or write the tokens into the dump",
            rows=sorted(lacking),
        )
    return [length or 0 for length in lengths]


def _epoch(plan: UpdatePlan, updates: list[_Update]) -> _Update:
    rows = [row for update in updates for row in update.rows]
    return _Update(
        rows,
        len(set(plan.result.index.row_rollout[rows].tolist())),
        sum(update.tokens for update in updates),
        None if plan.config.max_tokens_per_gpu is None else [part for u in updates for part in u.micro_batches or []],
        sum(update.by_rollouts for update in updates),
        sum(update.by_rows for update in updates),
    )


def _cells(name: str, update: _Update) -> list[str]:
    counts = [update.rollouts, len(update.rows), update.tokens]
    if update.micro_batches is not None:
        counts.append(len(update.micro_batches))
    return [name, *map(str, counts), number(update.by_rollouts), number(update.by_rows)]


def _rule(config: UpdateConfig) -> str:
    if config.unit == "rows":
        cap = "" if config.max_updates is None else f", at most {counted(config.max_updates, 'update')}"
        return f"{counted(config.rows_per_update or 0, 'row')} per update{cap}"
    if config.rollouts_per_update is None:
        return "all rollouts in one update"
    return f"{counted(config.rollouts_per_update, 'rollout')} per update, leftover {config.leftover}"


def _in_no_update(plan: UpdatePlan, batch: Batch) -> list[tuple[str, str]]:
    rows = _dropped_rows(plan, batch)
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


def _dropped_rows(plan: UpdatePlan, batch: Batch) -> list[int]:
    """Rows that the plan takes from training: of dropped rollouts, and the lost ones of others."""
    rollouts = {*plan.dropped_rollouts, *plan.partly_dropped_rollouts}
    # Not the padding of the plan's result: to drop_first, what was dropped is padding.
    index, padding = plan.result.index, batch.result.columns.padding
    out = plan.row_update < 0
    if padding is not None:
        out = out & ~padding
    rows = zip(index.row_rollout.tolist(), out.tolist(), strict=True)
    return [row for row, (rollout, is_out) in enumerate(rows) if is_out and rollout in rollouts]


def _ids(plan: UpdatePlan, rollouts: list[int]) -> list[Any]:
    return [json_id(plan.result.index.rollout_ids[rollout]) for rollout in rollouts]
