"""What ``audit`` prints: in words what is wrong and what to change, then the figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_norm.audit import audit_dumps
from miles_norm.audit.baselines import BASELINES
from miles_norm.audit.summary import counted, number
from miles_norm.cli.inputs import kept_warnings, parse_sizes
from miles_norm.cli.table import Column, Note, print_table
from miles_norm.cli.terminal import show_lines
from miles_norm.cli.waiting import bar
from miles_norm.metrics import PREFIX

if TYPE_CHECKING:
    from miles_norm.audit import Audit, AuditedStep
    from miles_norm.config import NormalizationConfig

__all__ = ["audit_json", "print_audit", "run_audit"]

_TABLE_LIMIT = 40


def run_audit(
    dumps: list[Path], config: NormalizationConfig, sizes: str | None, baseline: str
) -> tuple[Audit, list[str]]:
    """Audit the dumps, with a bar over all of them; return the audit and warnings about the files."""
    given = "recorded" if sizes is None else None if sizes == "none" else parse_sizes(sizes)
    with kept_warnings() as warnings, bar(f"auditing {counted(len(dumps), 'dump')}") as progress:
        audit = audit_dumps(dumps, config, prompt_group_sizes=given, baseline=baseline, progress=progress)
    return audit, warnings


def print_audit(console: Console, audit: Audit) -> None:
    """Print the findings, the figures of the last step or a table of all steps, and what was compared with what."""
    _print_findings(console, audit)
    console.print()
    rule = f"baseline {audit.baseline}: {BASELINES[audit.baseline].rule}"
    if len(audit.steps) > 1:
        show_lines(console, f"{_totals(audit)}; {rule}", style="bold")
        _print_steps(console, audit)
        return
    [step] = audit.steps
    show_lines(console, f"{step.name}: {_totals(audit)}; {rule}", style="bold")
    lines = _figures(step, audit.baseline)
    width = max(map(len, lines))
    show_lines(console, "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))


def _print_findings(console: Console, audit: Audit) -> None:
    findings = audit.findings
    if not findings:
        show_lines(console, "nothing was found that needs a change", style="bold green")
        return
    for place, (name, found) in enumerate(findings.items()):
        if place:
            console.print()
        number, first = found[0]
        several = len(audit.steps) > 1
        where = f"in {len(found)} of {len(audit.steps)} dumps; {audit.steps[number].name}: " if several else ""
        show_lines(console, f"{where}{first.problem}", head=f"{name.replace('_', ' ')}: ", style="bold yellow")
        show_lines(console, f"  to change: {first.remedy}")


def _totals(audit: Audit) -> str:
    counts = {noun: sum(_value(step, f"{noun}s") or 0 for step in audit.steps) for noun in ("row", "rollout", "group")}
    texts = [counted(int(count), noun if noun != "group" else "prompt group") for noun, count in counts.items()]
    dumps = [counted(len(audit.steps), "dump")] if len(audit.steps) > 1 else []
    return ", ".join([*dumps, *texts])


def _value(step: AuditedStep, name: str) -> float | None:
    return step.metrics.get(PREFIX + name)


def _figures(step: AuditedStep, baseline: str) -> dict[str, str]:
    def shown(name: str) -> str:
        return number(_value(step, name))

    def share(name: str) -> str:
        value = _value(step, name)
        return "-" if value is None else f"{value:.0%}"

    def count(name: str) -> str:
        value = _value(step, name)
        return "-" if value is None else f"{int(value)}"

    vs = f"vs_{baseline}/"
    return {
        "reward mean": f"{shown('reward_mean')} per rollout, {shown('row_reward_mean')} per row",
        "fan-out": f"mean {shown('fan_out_mean')}, max {count('fan_out_max')}, {share('single_row_rollout_share')} of "
        "rollouts have one row",
        "no signal": f"{share('zero_variance_share')} of groups: {share('all_right_share')} all right, "
        f"{share('all_wrong_share')} all wrong",
        "effective": f"{count('effective_rollouts')} of {count('counted_rollouts')} rollouts in "
        f"{counted(int(_value(step, 'effective_groups') or 0), 'group')} have an advantage and tokens",
        "baseline": f"{count(vs + 'sign_flips')} of {count('trained_rows')} rows with the other sign, a mean change of "
        f"{shown(vs + 'mean_abs_change')}",
        "weights": f"{shown('weight/sample_mean_min')} to {shown('weight/sample_mean_max')} times an equal share in a "
        f"mean over rows, {shown('weight/token_mean_min')} to {shown('weight/token_mean_max')} over tokens",
    }


def _print_steps(console: Console, audit: Audit) -> None:
    """One line per step; of many, evenly spaced ones with the first and the last."""
    columns = [
        Column("dump", folds=True),
        Column("rows"),
        Column("rollouts"),
        Column("rollouts", "reward mean by"),
        Column("rows"),
        Column("signal", "no"),
        Column("sign", "other"),
        Column("by rows", "weight"),
    ]
    last = len(audit.steps) - 1
    shown = sorted({round(place * last / (_TABLE_LIMIT - 1)) for place in range(_TABLE_LIMIT)})
    lines = []
    for step in (audit.steps[place] for place in (shown if last >= _TABLE_LIMIT else range(last + 1))):
        counts = [f"{int(_value(step, name) or 0)}" for name in ("rows", "rollouts")]
        means = [number(_value(step, name)) for name in ("reward_mean", "row_reward_mean")]
        silent, flips = _value(step, "zero_variance_share"), _value(step, f"vs_{audit.baseline}/sign_flips")
        cells = ["-" if silent is None else f"{silent:.0%}", "-" if flips is None else f"{int(flips)}"]
        lines.append([step.name, *counts, *means, *cells, number(_value(step, "weight/sample_mean_max"))])
    print_table(console, columns, lines, [Note()] * len(lines))
    if last >= _TABLE_LIMIT:
        show_lines(console, f"{len(lines)} of {last + 1} dumps; the report and --json have all")


def audit_json(audit: Audit, warnings: list[str]) -> dict[str, Any]:
    """Config, findings, and the metrics of every step."""
    return {
        "config": audit.config.model_dump(mode="json"),
        "baseline": audit.baseline,
        "findings": [
            {
                "name": name,
                "dump": audit.steps[step].name,
                "problem": finding.problem,
                "remedy": finding.remedy,
                "rows": list(finding.rows),
                "groups": list(finding.groups),
            }
            for name, found in audit.findings.items()
            for step, finding in found
        ],
        "steps": [
            {
                "dump": step.name,
                "rollout_id": step.rollout_id,
                "group_source": step.group_source,
                "metrics": step.metrics,
            }
            for step in audit.steps
        ],
        "warnings": warnings,
    }
