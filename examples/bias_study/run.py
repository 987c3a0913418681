"""Run the study and write results.json, table.md and two pictures.

python examples/bias_study/run.py --rollouts 200000 -o out/bias_study
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from plots import draw, pyplot
from report import cutting_verdicts, gradient_verdicts, report
from rich.progress import Progress
from study import Settings, measure

from miles_norm.cli.terminal import console_for, exit_codes

DIGITS = 4
"""Of numbers in results.json, far beyond what the intervals allow to say."""


def main(
    rollouts: Annotated[int, typer.Option(help="Rollouts to sample, a multiple of 64.")] = Settings.rollouts,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of all that is drawn.")] = Settings.seed,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the results; files of an earlier run are replaced.")
    ] = Path("out/bias_study"),
    plots: Annotated[bool, typer.Option(help="Draw the pictures, which needs matplotlib.")] = True,
) -> None:
    """Measure how cutting rollouts into rows changes policy gradients, and how far each is from the true one."""
    with exit_codes():
        settings = Settings(rollouts, seed)
        torch.set_num_threads(1)  # the steps are too small to share
        if plots:
            pyplot()  # what is missing is said before the work, not after it
        output.mkdir(parents=True, exist_ok=True)
        with Progress(console=console_for(stderr=True), transient=True) as progress:
            task = progress.add_task(f"{rollouts:,} rollouts", total=settings.steps)
            results = rounded(measure(settings, lambda: progress.advance(task)))
        written = [output / "results.json", output / "table.md"]
        written[0].write_text(as_json(results), encoding="utf-8")
        written[1].write_text(f"# Bias study\n\n{report(results)}", encoding="utf-8")
        if plots:
            written += draw(results, output)
        print("Cutting, against the same rollouts uncut:", cutting_verdicts(results), sep="\n\n", end="\n\n")
        print("Against the true gradient, whole rollouts:", gradient_verdicts(results), sep="\n\n", end="\n\n")
        print("wrote", ", ".join(map(str, written)))


def rounded(value: Any) -> Any:
    """The same values with few digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def as_json(results: dict[str, Any]) -> str:
    """One line for each comparison."""
    parts = []
    for name, value in results.items():
        lines = ",\n".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f'"{name}": [\n{lines}\n]' if lines else f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    typer.run(main)
