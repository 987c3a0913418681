"""Audit the dumps of a run, one after the other: of each only its figures, its findings and a sample are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_norm.audit.baselines import baseline_advantages, find_baseline
from miles_norm.audit.findings import CHECKS, Evidence, Finding, find
from miles_norm.audit.metrics import Comparison, audit_metrics, compare_rows, comparison_metrics
from miles_norm.audit.row_notes import RowNotes
from miles_norm.audit.sampling import shown_groups, shown_points
from miles_norm.audit.tolerant import normalize_tolerantly
from miles_norm.columns import columns_from_rows
from miles_norm.config import NormalizationConfig
from miles_norm.dumps import stream_dump
from miles_norm.errors import ConfigError, DumpError, MilesNormError
from miles_norm.result import NormalizedRewards
from miles_norm.storage.atomic import is_there

__all__ = ["Audit", "AuditedStep", "audit_dumps", "audit_rows"]

PAGE_ROWS = 5000
"""Rows that a page describes one by one, over all steps."""

PAGE_POINTS = 4000
"""Rollouts that a page draws, over all steps."""

_LEAST = 24
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class AuditedStep:
    """What is kept of one dump."""

    name: str
    rollout_id: int | None
    """Number of the rollout step; None where the dump has none."""
    group_source: str
    """What formed the prompt groups."""
    metrics: dict[str, float]
    """Of ``audit_metrics``."""
    findings: tuple[Finding, ...]
    groups: list[dict[str, Any]]
    """Prompt groups that a page shows in full."""
    points: dict[str, list[Any]]
    """Columns over the rollouts that a page draws."""


@dataclass(frozen=True)
class Audit:
    """The steps of a run, in its order."""

    config: NormalizationConfig
    baseline: str
    steps: tuple[AuditedStep, ...]

    @property
    def findings(self) -> dict[str, list[tuple[int, Finding]]]:
        """Findings by name, the most serious first, each with the number of its step in ``steps``."""
        found: dict[str, list[tuple[int, Finding]]] = {}
        for number, step in enumerate(self.steps):
            for finding in step.findings:
                found.setdefault(finding.name, []).append((number, finding))
        return {name: found[name] for name in CHECKS if name in found}


def audit_rows(
    rows: Iterable[Mapping[str, Any]],
    config: NormalizationConfig | None = None,
    *,
    prompt_group_sizes: Sequence[Any] | None = None,
    baseline: str = "rows",
    share: float = 1.0,
) -> AuditedStep:
    """Audit the rows of one step; rows that come one by one are not kept.

    Where normalization would refuse rows, a setting is relaxed and a finding says so (``normalize_tolerantly``).

    Args:
        rows: Dicts with Miles' field names.
        config: Defaults to ``NormalizationConfig()``.
        prompt_group_sizes: Rows per prompt group, as recorded before flattening.
        baseline: What to compare with: a name of ``miles_norm.audit.baselines``.
        share: The share of a page that this step may fill.

    Raises:
        ConfigError: no such baseline, or one that lacks a setting of the config.
        MilesNormError: rows that cannot be read at all.

    >>> rows = [{"group_index": 0, "rollout_id": k, "reward": r, "response_length": 8}
    ...         for k, r in ((0, 1.0), (0, 1.0), (0, 1.0), (1, 0.0))]
    >>> [finding.name for finding in audit_rows(rows).findings]
    ['changed_advantages', 'fan_out_weight']
    """
    find_baseline(baseline)
    config = NormalizationConfig.checked(config)
    notes = RowNotes()
    columns = columns_from_rows(notes.reading(rows), config)
    result, refused = normalize_tolerantly(columns, config, prompt_group_sizes)
    comparison, error = _compare(result, baseline)
    evidence = Evidence(result, baseline, comparison, error, notes, refused)
    metrics = audit_metrics(result, baseline=None)
    if comparison is not None:
        metrics |= comparison_metrics(comparison, baseline)
    return AuditedStep(
        name="",
        rollout_id=None,
        group_source=result.index.group_source,
        metrics=metrics,
        findings=find(evidence),
        groups=shown_groups(result, notes, comparison, max(int(PAGE_ROWS * share), _LEAST)),
        points=shown_points(result, comparison, max(int(PAGE_POINTS * share), 1)),
    )


def _compare(result: NormalizedRewards, baseline: str) -> tuple[Comparison | None, MilesNormError | None]:
    """The comparison, or what the baseline refuses the rows with."""
    try:
        return compare_rows(result, baseline_advantages(result, baseline)), None
    except ConfigError:
        raise  # no dump of the run could be compared
    except MilesNormError as error:
        return None, error


def audit_dumps(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    config: NormalizationConfig | None = None,
    *,
    prompt_group_sizes: Sequence[int] | str | None = "recorded",
    baseline: str = "rows",
    progress: Progress | None = None,
) -> Audit:
    """Audit the dumps of a run, read one after the other so that memory holds the rows of one.

    Steps stand in the order of their ``rollout_id`` where all dumps have different ones, else as they were given.

    Args:
        paths: Dumps, as ``read_dump`` takes them; or one.
        config: Defaults to ``NormalizationConfig()``.
        prompt_group_sizes: Rows per prompt group of every dump; "recorded": what each dump's metadata has; None: none.
        baseline: What to compare with: a name of ``miles_norm.audit.baselines``.
        progress: Called with (bytes read, bytes in all).

    Raises:
        ConfigError: no dumps, no such baseline, or one that lacks a setting of the config.
        MilesNormError: a dump that cannot be read, named by the message.
    """
    config = NormalizationConfig.checked(config)
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not paths:
        raise ConfigError(
            "dumps",
            got="none",
            expected="at least one",
            reason="there is nothing to audit",
            remedy="name the rollout dumps of a run",
        )
    find_baseline(baseline)
    files = [Path(path) for path in paths]
    sizes = [file.stat().st_size if is_there(file) else 0 for file in files]
    names = [file.name for file in files]
    steps = []
    for number, file in enumerate(files):
        name = file.name if names.count(file.name) == 1 else str(file)
        before, total = sum(sizes[:number]), sum(sizes)
        part = None if progress is None else _part(progress, before, total)
        try:
            stream = stream_dump(file, progress=part)
            given = stream.metadata.get(_SIZES) if prompt_group_sizes == "recorded" else prompt_group_sizes
            step = audit_rows(
                stream.rows, config, prompt_group_sizes=given, baseline=baseline, share=1 / len(files)
            )  # fmt: skip
        except (ConfigError, DumpError):
            raise
        except MilesNormError as error:
            raise error.within(file) from None  # each dump has a row 0
        steps.append(replace(step, name=name, rollout_id=stream.rollout_id))
    numbers = [step.rollout_id for step in steps]
    if None not in numbers and len(set(numbers)) == len(numbers):
        steps.sort(key=lambda step: step.rollout_id or 0)
    return Audit(config, baseline, tuple(steps))


_SIZES = "prompt_group_sizes"


def _part(progress: Progress, before: int, total: int) -> Progress:
    """Progress within one file, as a part of all."""
    return lambda done, _: progress(before + done, total)
