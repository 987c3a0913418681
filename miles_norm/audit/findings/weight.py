"""Checks of what fan-out does: to advantages that count rows, and to losses that do."""

from __future__ import annotations

import torch

from miles_norm.audit.baselines import BASELINES
from miles_norm.audit.findings.evidence import Evidence, Finding, rollout_labels, where
from miles_norm.audit.metrics import Comparison, relative_weights
from miles_norm.audit.summary import counted, number
from miles_norm.errors import format_rows

__all__ = ["baseline_refuses", "changed_advantages", "fan_out_weight"]

CHANGED = 0.05
"""A mean change of this share of the mean advantage, beyond a factor common to all rows, is worth a word."""

UNEVEN = 1.5
"""A rollout that weighs this many times an equal share is worth a word."""

_NAMED = 8


def baseline_refuses(e: Evidence) -> Finding | None:
    """Rows with which the framework compared with would stop."""
    error = e.baseline_error
    if error is None:
        return None
    return e.finding(
        "baseline_refuses",
        f"The baseline {e.baseline} does not take these rows. {error.subject}: {error.got}; expected {error.expected}.",
        error.remedy,
        rows=error.rows,
    )


def changed_advantages(e: Evidence) -> Finding | None:
    """Advantages that another rule turns around, or changes by a part that matters."""
    rows = e.comparison
    if rows is None or not bool(rows.trained.any()):
        return None
    usable, lost, flips = int(rows.usable.sum()), where(rows.trained & ~rows.usable), where(rows.flips)
    change = float(rows.change.abs().sum()) / max(usable, 1)
    if not lost and not flips and not _changes_more_than_the_scale(rows):
        return None
    named = lost or flips or torch.sort(rows.change.abs(), descending=True).indices[:_NAMED].tolist()
    texts = [f"{counted(len(lost), 'row')} get no finite advantage"] if lost else []
    if flips:
        texts.append(f"{len(flips)} of {counted(usable, 'trained row')} are pushed the other way")
    if usable:
        largest = float(rows.change.abs().max())
        texts.append(f"advantages change by {number(change)} on average and {number(largest)} at most")
    return e.finding(
        "changed_advantages",
        f"With the baseline {e.baseline}, where {BASELINES[e.baseline].rule}, {' and '.join(texts)}: see "
        f"{format_rows(named, limit=_NAMED)}.",
        "take the advantages of miles_norm, where a rollout is one observation: those are the figures here",
        rows=named,
        groups=dict.fromkeys(e.result.index.row_group[named].tolist()),
    )


def _changes_more_than_the_scale(rows: Comparison) -> bool:
    """Rows of a fan-out that is the same everywhere have another n - 1 below the root, which scales all advantages."""
    ours, theirs = rows.ours[rows.usable].double(), rows.theirs[rows.usable].double()
    factor = float((ours * theirs).sum()) / max(float((ours * ours).sum()), 1e-300)
    return float((theirs - factor * ours).abs().sum()) > CHANGED * abs(factor) * float(ours.abs().sum())


def fan_out_weight(e: Evidence) -> Finding | None:
    """Rollouts that weigh more in a mean over rows because they were cut into more of them."""
    result = e.result
    weights = relative_weights(result, "sample_mean")
    trained = weights > 0
    if not bool(trained.any()) or float(weights.max()) < UNEVEN:
        return None
    heaviest = torch.sort(weights, descending=True, stable=True).indices[:_NAMED]
    heavy: list[int] = heaviest[weights[heaviest] >= UNEVEN].tolist()
    tokens = relative_weights(result, "token_mean")[trained]
    least, most = float(weights[trained].min()), float(weights.max())
    index = result.index
    return e.finding(
        "fan_out_weight",
        f"Rollouts were cut into different numbers of rows: a loss that averages over rows (sample_mean) weighs them "
        f"{number(least)} to {number(most)} times an equal share, one that averages over tokens (token_mean) "
        f"{number(float(tokens.min()))} to {number(float(tokens.max()))} times. Heaviest: "
        f"{format_rows(rollout_labels(result, heavy), 'rollout', _NAMED)}.",
        "LossConfig(aggregation='rollout_mean'), the default, weighs each rollout once",
        rows=where(torch.isin(index.row_rollout, torch.tensor(heavy, device=index.row_rollout.device))),
        groups=dict.fromkeys(index.rollout_group[heavy].tolist()),
    )
