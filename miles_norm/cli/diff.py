"""What ``diff`` compares and prints: configs, baselines, or dumps with the advantages that they record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from miles_norm.audit.baselines import BASELINES, baseline_advantages
from miles_norm.audit.difference import Advantages, Difference, RolloutChange, compare_advantages
from miles_norm.audit.findings.evidence import rollout_labels
from miles_norm.audit.summary import counted, label, number
from miles_norm.cli.explanations import row_names
from miles_norm.cli.inputs import Batch, kept_warnings, load, read_config, reading
from miles_norm.cli.table import Column, Note, print_table
from miles_norm.cli.terminal import show_lines
from miles_norm.config.base import Config as SettingsModel
from miles_norm.config.base import as_yaml
from miles_norm.errors import ConfigError, DumpError, MilesNormError, format_rows

if TYPE_CHECKING:
    from miles_norm.result import NormalizedRewards

__all__ = ["Comparison", "Inputs", "compare", "diff_json", "print_diff"]

_TABLE_LIMIT = 40
_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Inputs:
    """Options that hold for both sides."""

    dump: Path | None
    config: Path | None
    settings: Sequence[str]
    sizes: str | None
    tolerance: float


@dataclass(frozen=True)
class _Side:
    name: str
    kind: str
    """config, baseline, recorded, or computed."""
    result: NormalizedRewards
    advantages: Advantages
    warnings: tuple[str, ...]
    """Each with the dump that it is about."""


@dataclass(frozen=True)
class Comparison:
    """Two sides, and what changes from the first to the second."""

    a: _Side
    b: _Side
    difference: Difference
    on: Path | None
    """The dump that both were computed on; None where each side is one."""

    @property
    def warnings(self) -> list[str]:
        """Those of both sides, each once."""
        return list(dict.fromkeys([*self.a.warnings, *self.b.warnings]))


def compare(a: str, b: str, inputs: Inputs) -> Comparison:
    """Compute or read both sides and compare them row by row.

    Raises:
        ConfigError: a config or baseline without a dump, or two dumps that do not hold the same rows.
        MilesNormError: of reading and normalizing.
    """
    sides = [_named_side(name, inputs) for name in (a, b)]
    left, right = sides
    if left.result.index.num_rows != right.result.index.num_rows or _ids(left.result) != _ids(right.result):
        raise _other_rows(left, right)
    difference = compare_advantages(
        left.result.index, left.advantages, right.advantages, tolerance=inputs.tolerance
    )  # fmt: skip
    on = inputs.dump if any(side.kind in ("config", "baseline") for side in sides) else None
    return Comparison(left, right, difference, on)


def _named_side(name: str, inputs: Inputs) -> _Side:
    """A side; what is wrong with its rows says of which side they are."""
    try:
        return _side(name, inputs)
    except (ConfigError, DumpError):
        raise  # these name a setting or a file already
    except MilesNormError as error:
        raise error if name in error.subject else error.within(name) from None


def _side(name: str, inputs: Inputs) -> _Side:
    path = Path(name)
    if name in BASELINES:
        kind, config, dump = "baseline", inputs.config, _dump(name, inputs)
    elif path.suffix.lower() in _YAML:
        kind, config, dump = "config", path, _dump(name, inputs)
    else:
        kind, config, dump = "dump", inputs.config, path
    batch = load(dump, read_config(config, inputs.settings), inputs.sizes)
    if kind == "dump":
        kind = "recorded" if batch.rows_with_added_keys else "computed"
    if kind == "baseline":
        advantages = Advantages(baseline_advantages(batch.result, name))
    else:
        advantages = _recorded(batch) if kind == "recorded" else _computed(batch)
    return _Side(name, kind, batch.result, advantages, tuple(f"{dump}: {text}" for text in batch.warnings))


def _dump(name: str, inputs: Inputs) -> Path:
    if inputs.dump is None:
        raise ConfigError(
            name,
            got="no dump",
            expected="--dump DUMP",
            reason="a config or a baseline gives advantages on the rows of a dump",
            remedy="write for example: miles-norm diff old.yaml new.yaml --dump rollout_0.pt",
        )
    return inputs.dump


def _computed(batch: Batch) -> Advantages:
    return Advantages(batch.result.advantages, batch.result.trained_rows)


def _recorded(batch: Batch) -> Advantages:
    """``advantage`` and ``trained`` of every row, as ``normalize -o`` writes them."""
    with kept_warnings(), reading(batch.path) as stream:
        rows = [(row.get("advantage"), row.get("trained")) for row in stream.rows]
    numbers = [value for value, _ in rows if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(rows):
        lacking = [
            n for n, (value, _) in enumerate(rows) if isinstance(value, bool) or not isinstance(value, int | float)
        ]
        raise DumpError(
            f"rollout dump {batch.path}",
            got=f"{format_rows(lacking)} without a number as advantage",
            expected="one on every row, or on none",
            reason="recorded advantages are compared row by row",
            remedy="write them with miles-norm normalize DUMP -o FILE, or remove the key from all rows",
            rows=lacking,
        )
    trained = [flag for _, flag in rows]
    known = all(isinstance(flag, bool) for flag in trained)
    values = torch.tensor(numbers, dtype=torch.float64)
    return Advantages(values, torch.tensor(trained) if known else None)


def _ids(result: NormalizedRewards) -> list[Any]:
    column = result.columns.rollout
    return [] if column is None else column.labels_at(torch.arange(result.index.num_rows))


def _other_rows(left: _Side, right: _Side) -> ConfigError:
    rows = [side.result.index.num_rows for side in (left, right)]
    pairs = zip(_ids(left.result), _ids(right.result), strict=False)
    differing = [row for row, (one, other) in enumerate(pairs) if one != other]
    got = f"{rows[0]} and {rows[1]} rows" if rows[0] != rows[1] else f"other rollout ids on {format_rows(differing)}"
    return ConfigError(
        f"{left.name} and {right.name}",
        got=got,
        expected="the same rows in the same order",
        reason="advantages are compared row by row",
        remedy="compare two configs on one dump, or two versions of one dump",
    )


def print_diff(console: Console, comparison: Comparison, *, show_all: bool) -> None:
    """Print what changes: settings, counts, and a line per rollout, the most changed first."""
    difference, a, b = comparison.difference, comparison.a, comparison.b
    on = "" if comparison.on is None else f" on {comparison.on}"
    show_lines(console, f"{a.name} -> {b.name}{on}", style="bold")
    for line in _settings(comparison):
        show_lines(console, f"setting {line}")
    index = difference.index
    if not difference:
        show_lines(console, f"no change on {counted(index.num_rows, 'row')}")
        return
    changes = difference.rollouts()
    show_lines(console, _changed(difference, changes))
    show_lines(console, _sizes(difference))
    shown = changes if show_all else changes[:_TABLE_LIMIT]
    console.print()
    columns = [
        Column("group", folds=True),
        Column("rollout", folds=True),
        Column("rows", folds=True),
        Column("before"),
        Column("after"),
        Column("change"),
    ]
    notes = [Note(_note(change), "yellow") for change in shown]
    print_table(console, columns, [_cells(index, change) for change in shown], notes)
    if len(shown) < len(changes):
        show_lines(console, f"{len(shown)} of {len(changes)} rollouts, the most changed first; --all shows every one")


def _settings(comparison: Comparison) -> list[str]:
    a, b = (dict(_flat(side.result.config)) for side in (comparison.a, comparison.b))
    return [f"{name}: {as_yaml(a[name])} -> {as_yaml(b[name])}" for name in a if a[name] != b[name]]


def _flat(config: SettingsModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its name, those of nested models with dots."""
    for name, value in config:
        if isinstance(value, SettingsModel):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _changed(difference: Difference, changes: list[RolloutChange]) -> str:
    index = difference.index
    groups = len(set(index.rollout_group[[change.rollout for change in changes]].tolist()))
    return (
        f"{int(difference.changed.sum())} of {counted(index.num_rows, 'row')} change, of {len(changes)} of "
        f"{counted(index.num_rollouts, 'rollout')} in {groups} of {counted(index.num_groups, 'prompt group')}"
    )


def _sizes(difference: Difference) -> str:
    size = difference.size[difference.changed]
    known = size[torch.isfinite(size)]
    mean = number(float(known.mean()) if len(known) else None)
    largest = number(float(known.max()) if len(known) else None)
    texts = [f"by {mean} on average, {largest} at most", f"{int(difference.flips.sum())} turn their sign"]
    if lost := int((~torch.isfinite(size)).sum()):
        texts.append(f"{lost} are a number on one side only")
    if retrained := int(difference.retrained.sum()):
        texts.append(f"{retrained} are trained on one side only")
    return "; ".join(texts)


def _cells(index: Any, change: RolloutChange) -> list[str]:
    group, name = index.group_ids[int(index.rollout_group[change.rollout])], index.rollout_ids[change.rollout]
    ends = [_range(*change.before), _range(*change.after)]
    return [label(group), label(name), row_names(list(change.rows)), *ends, number(change.largest)]


def _range(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _note(change: RolloutChange) -> str:
    texts = [f"{counted(change.flips, 'row')} turned"] if change.flips else []
    return ", ".join([*texts, *([f"{counted(change.training, 'row')} trained on one side"] if change.training else [])])


def diff_json(comparison: Comparison) -> dict[str, Any]:
    """The same for programs, with every rollout that changes."""
    difference, index = comparison.difference, comparison.difference.index
    changes = difference.rollouts()
    names = rollout_labels(comparison.a.result, [change.rollout for change in changes])
    return {
        "a": comparison.a.name,
        "b": comparison.b.name,
        "dump": None if comparison.on is None else str(comparison.on),
        "settings": _settings(comparison),
        "rows": index.num_rows,
        "changed_rows": int(difference.changed.sum()),
        "sign_flips": int(difference.flips.sum()),
        "retrained_rows": int(difference.retrained.sum()),
        "rollouts": [
            {
                "group": label(index.group_ids[int(index.rollout_group[change.rollout])]),
                "rollout": name,
                "rows": list(change.rows),
                "before": list(change.before),
                "after": list(change.after),
                "largest_change": change.largest,
                "sign_flips": change.flips,
                "retrained_rows": change.training,
            }
            for name, change in zip(names, changes, strict=True)
        ],
        "warnings": comparison.warnings,
    }
