"""An audit as one HTML page that works from a disk."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import miles_norm
from miles_norm.advantages import ESTIMATORS
from miles_norm.audit.baselines import BASELINES
from miles_norm.audit.run import Audit
from miles_norm.config.base import changed_settings
from miles_norm.metrics import PREFIX
from miles_norm.pages import build_page, shared_asset
from miles_norm.storage.atomic import replacing

__all__ = ["page_data", "report_page", "write_report"]


def write_report(audit: Audit, path: str | os.PathLike[str]) -> None:
    """Write the page; the file appears whole or not at all.

    Raises:
        DumpError: the folder is missing or not writable.
    """
    with replacing(Path(path), f"report {os.fspath(path)}") as file:
        file.write(report_page(audit).encode("utf-8", "backslashreplace"))  # a file may have any name


def report_page(audit: Audit) -> str:
    """The page as text: it loads nothing, and shows any text of a dump as text."""
    assets = files(__package__) / "page"
    own = [
        assets.joinpath(name).read_text(encoding="utf-8")
        for name in ("plots.js", "report.js", "sections.js", "groups.js")
    ]
    return build_page(
        "Rollout audit" if len(audit.steps) > 1 else f"Rollout audit of {audit.steps[0].name}",
        page_data(audit),
        styles=[shared_asset("theme.css"), assets.joinpath("report.css").read_text(encoding="utf-8")],
        scripts=[shared_asset("elements.js"), shared_asset("tree.js"), *own],
    )


def page_data(audit: Audit) -> dict[str, Any]:
    """What the scripts of the page read."""
    steps, config = audit.steps, audit.config
    names = list(dict.fromkeys(name for step in steps for name in step.metrics))
    metrics = {name.removeprefix(PREFIX): [step.metrics.get(name) for step in steps] for name in names}
    return {
        "version": miles_norm.__version__,
        "baseline": {"name": audit.baseline, "rule": BASELINES[audit.baseline].rule},
        "estimator": _estimator(audit),
        "settings": [text for text in changed_settings(config) if not text.startswith("advantage_estimator=")],
        "steps": [{"name": step.name, "rollout_id": step.rollout_id} for step in steps],
        "metrics": metrics,
        "findings": _findings(audit),
        "groups": [{**group, "step": number} for number, step in enumerate(steps) for group in step.groups],
        "points": _points(audit),
        "sample": {"groups": _total(audit, "groups"), "rollouts": _total(audit, "counted_rollouts")},
    }


def _total(audit: Audit, name: str) -> int:
    return sum(int(step.metrics[PREFIX + name]) for step in audit.steps)


def _estimator(audit: Audit) -> str:
    config = audit.config
    if not config.normalizes_groups:
        return f"{config.advantage_estimator}, rows keep their own rewards"
    definition = ESTIMATORS[config.advantage_estimator].definition(config)
    return f"{config.advantage_estimator}, {definition} over the rollouts of a prompt"


def _findings(audit: Audit) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "places": [
                {"step": step, "problem": finding.problem, "remedy": finding.remedy, "groups": list(finding.groups)}
                for step, finding in places
            ],
        }
        for name, places in audit.findings.items()
    ]


def _points(audit: Audit) -> dict[str, list[Any]]:
    """Columns over all steps."""
    columns = {name: [value for step in audit.steps for value in step.points[name]] for name in audit.steps[0].points}
    return columns | {"step": [number for number, step in enumerate(audit.steps) for _ in step.points["rollout"]]}
