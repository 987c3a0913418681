"""The results as pictures; needs matplotlib, the extra "plots"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estimators import ADVANTAGES, ESTIMATORS
from report import CUT_SHAPES, Results

from miles_norm.extras import import_package

MARKERS = dict(zip(ADVANTAGES, "os^", strict=True))
NAMES = [estimator.name for estimator in ESTIMATORS]


def pyplot() -> Any:
    """matplotlib's, made to draw the same bytes each time, and text as text.

    Raises:
        MissingDependencyError: it is not installed.
    """
    need = {"reason": "it draws the pictures", "remedy": "pip install 'miles-norm[plots]', or pass --no-plots"}
    matplotlib = import_package("matplotlib", "the plots of the study", **need)
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "miles_norm", "svg.fonttype": "none", "font.size": 8})
    return import_package("matplotlib.pyplot", "the plots of the study", **need)


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw ``cutting.svg`` and ``gradient.svg``."""
    return [_cutting(results, folder / "cutting.svg"), _gradient(results, folder / "gradient.svg")]


def _cutting(results: Results, path: Path) -> Path:
    figure, axes = pyplot().subplots(1, len(CUT_SHAPES), figsize=(10, 4), sharey=True, layout="constrained")
    for axis, shape in zip(axes, CUT_SHAPES, strict=True):
        entries = [e for e in results["cutting"] if (e["shape"], e["plan"]) == (shape, "whole batch")]
        _spans(axis, entries, "difference")
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_title(shape)
        axis.set_xlabel("% of the uncut gradient")
    return _save(figure, axes[0], "Change of the mean gradient by cutting, one update a batch", path)


def _gradient(results: Results, path: Path) -> Path:
    panels = (
        ("along", "length along the true gradient", 1),
        ("angle", "angle to it, degrees", 0),
        ("cosine", "cosine of one batch to it", 1),
    )
    figure, axes = pyplot().subplots(1, len(panels), figsize=(10, 4), sharey=True, layout="constrained")
    entries = [e for e in results["gradient"] if (e["shape"], e["plan"]) == ("failures retry", "whole batch")]
    for axis, (field, title, right) in zip(axes, panels, strict=True):
        _spans(axis, entries, field)
        axis.axvline(right, color="black", linewidth=0.6)
        axis.set_xlabel(title)
    return _save(figure, axes[0], "Against the true gradient, failures retry, one update a batch", path)


def _spans(axis: Any, entries: list[dict[str, Any]], field: str) -> None:
    """One interval for each estimator and advantage estimator."""
    for shift, advantage in enumerate(ADVANTAGES):
        found = {e["estimator"]: e[field] for e in entries if e["advantage"] == advantage}
        values = [found[name][0] for name in NAMES]
        below, above = ([abs(found[name][end] - found[name][0]) for name in NAMES] for end in (1, 2))
        places = [place + (shift - 1) * 0.25 for place in range(len(NAMES))]
        axis.errorbar(
            values, places, xerr=(below, above), fmt=MARKERS[advantage], markersize=3, linewidth=0.8, label=advantage
        )


def _save(figure: Any, first: Any, title: str, path: Path) -> Path:
    first.set_yticks(range(len(NAMES)), NAMES)
    first.invert_yaxis()
    figure.suptitle(title)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
    return path
