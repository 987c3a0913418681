"""The results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cutting import SHAPES
from estimators import ADVANTAGES, ESTIMATORS, PLANS

Results = dict[str, Any]
CUT_SHAPES = tuple(name for name in SHAPES if name != "no cut")
WHOLE = PLANS[:2]
"""Plans that never split a rollout."""


def report(results: Results) -> str:
    """Every table."""
    settings = results["settings"]
    parts = [
        f"{settings['rollouts']:,} rollouts in {settings['batches']:,} batches, seed {settings['seed']}.",
        "## Shapes", shapes(results),
        "## Cutting: where the interval of the difference to the uncut gradient holds 0", cutting_verdicts(results),
        *(
            part
            for advantage in ADVANTAGES
            for plan in PLANS
            for part in (
                f"## Cutting, {advantage}, updates of {plan}: difference in % of the uncut gradient",
                cutting(results, plan, advantage),
            )
        ),
        "## True gradient: where the interval of the bias holds 0", gradient_verdicts(results),
        "## True gradient: a random denominator", random_denominator(results),
        *(
            part
            for shape in SHAPES
            for plan in PLANS
            for part in (f"## True gradient, {shape}, updates of {plan}", gradient(results, shape, plan))
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def shapes(results: Results) -> str:
    """How often and into how many rows rollouts are cut."""
    outcomes = ("of failures", "of successes")
    head = ("shape", "single-row rollouts", *outcomes, "rows a rollout", *outcomes)
    lines = []
    for each in results["shapes"]:
        shares, rows = ([numbers[2], *numbers[:2]] for numbers in (each["single_row"], each["rows"]))
        lines.append([each["shape"], *(f"{share:.0%}" for share in shares), *(f"{mean:.2f}" for mean in rows)])
    return _table(head, lines)


def cutting(results: Results, plan: str, advantage: str) -> str:
    """What cutting does to each estimator, by shape."""
    return _cutting_table(results, CUT_SHAPES, lambda shape: (shape, plan, advantage))


def cutting_by_plan(results: Results, shape: str, advantage: str) -> str:
    """What cutting does to each estimator, by what an update holds."""
    return _cutting_table(results, PLANS, lambda plan: (shape, plan, advantage))


def cutting_verdicts(results: Results) -> str:
    """In how many comparisons, over shapes and advantage estimators, cutting makes a difference."""
    number = len(CUT_SHAPES) * len(ADVANTAGES)
    lines = []
    for estimator in ESTIMATORS:
        cells = []
        for plan in PLANS:
            found = [e for e in results["cutting"] if (e["plan"], e["estimator"]) == (plan, estimator.name)]
            holding = sum(e["holds_zero"] for e in found)
            same = all(e["identical"] for e in found)
            cells.append("identical" if same else f"{holding} of {number}")
        lines.append([estimator.name, *cells])
    return _table(("intervals that hold 0", *PLANS), lines)


def gradient(results: Results, shape: str, plan: str) -> str:
    """How far from the true gradient each estimator is."""
    head = (
        "advantages", "estimator", "bias, %", "holds 0", "along the true gradient", "angle, degrees", "variance",
        "cosine of a batch",
    )  # fmt: skip
    lines = []
    for advantage in ADVANTAGES:
        for estimator in ESTIMATORS:
            e = _entry(results["gradient"], (shape, plan, advantage), estimator.name)
            lines.append(
                [
                    advantage, estimator.name, _span(e["bias"], 1), "yes" if e["holds_zero"] else "no",
                    _span(e["along"], 2), _span(e["angle"], 1), _span(e["variance"], 3), _span(e["cosine"], 3),
                ]
            )  # fmt: skip
    return _table(head, lines)


def gradient_verdicts(results: Results) -> str:
    """In how many comparisons, over shapes and updates of whole rollouts, the bias may be 0."""
    lines = []
    for estimator in ESTIMATORS:
        cells = []
        for advantage in ADVANTAGES:
            found = [_entry(results["gradient"], (s, p, advantage), estimator.name) for s in SHAPES for p in WHOLE]
            cells.append(f"{sum(e['holds_zero'] for e in found)} of {len(found)}")
        lines.append([estimator.name, *cells])
    return _table(("intervals that hold 0", *ADVANTAGES), lines)


def random_denominator(results: Results) -> str:
    """What dividing by the tokens of an update costs ``token_mean``, by the rollouts in an update."""
    lines = [[str(e["rollouts"]), _span(e["bias"], 2)] for e in results["random_denominator"]]
    return _table(("rollouts in an update", "bias of token_mean with rloo, %"), lines)


def _cutting_table(results: Results, columns: Sequence[str], of: Callable[[str], tuple[str, str, str]]) -> str:
    entries = results["cutting"]
    lines = [
        [estimator.name, *(_difference(_entry(entries, of(column), estimator.name)) for column in columns)]
        for estimator in ESTIMATORS
    ]
    return _table(("estimator", *columns), lines)


def _entry(entries: Iterable[dict[str, Any]], key: tuple[str, str, str], estimator: str) -> dict[str, Any]:
    names = (*key, estimator)
    return next(e for e in entries if (e["shape"], e["plan"], e["advantage"], e["estimator"]) == names)


def _difference(entry: dict[str, Any]) -> str:
    return "identical" if entry["identical"] else _span(entry["difference"], 1)


def _span(numbers: Sequence[float], digits: int) -> str:
    value, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])
