"""Does it matter? The same training with three normalizations over several seeds, with the spread.

    python examples/train_tiny_agent/compare.py out/compare

Each seed has a warm start, prompts and sampling seeds of its own. Its three runs share them, so differences are paired.
Writes ``results.json``, ``table.md`` and ``curves.svg``; with ``--docs`` also what docs/evidence.md shows.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from step import NORMALIZATIONS
from warm_start import warm_start

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
# Of eight policies that imitated for the 250 steps of train.py, one had not learnt the format: none of its rollouts
# succeed often enough to learn from, however rewards are normalized.
WARM_START_STEPS = 400
NAMES = {
    "rows": "row advantages, mean over rows",
    "rollout_advantages": "rollout advantages, mean over rows",
    "rollouts": "rollout advantages, mean over rollouts",
}
# Two-sided 95% quantiles of Student's t, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201}
START, END = "<!-- compare.py -->\n", "<!-- end -->\n"


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the runs and the results.")],
    seeds: Annotated[int, typer.Option(min=2, max=12)] = 8,
    steps: Annotated[int, typer.Option(min=1)] = 10,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; each takes about one core.")] = 2,
    docs: Annotated[bool, typer.Option(help="Also write what docs/evidence.md shows.")] = False,
) -> None:
    """Train with each normalization on each seed; finished runs are kept, so that it can be interrupted."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    cases = [(seed, name) for seed in range(seeds) for name in NORMALIZATIONS]
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("warm starts", total=seeds + len(cases))
        for seed in range(seeds):
            if not (model := out / f"warm_start_{seed}.safetensors").exists():
                warm_start(WARM_START_STEPS, seed).save(model)
            progress.advance(bar)
        progress.update(bar, description="runs")
        for done in as_completed([pool.submit(train, out, seed, name, steps) for seed, name in cases]):
            done.result()
            progress.advance(bar)
    results = collected(out, seeds, steps, time.monotonic() - began)
    write(results, out)
    if docs:
        write(results, DOCS, "evidence")
        page = DOCS / "evidence.md"
        text = page.read_text()
        page.write_text(text.split(START)[0] + START + table(results) + END + text.split(END)[1])
    print(table(results))


def train(out: Path, seed: int, name: str, steps: int) -> None:
    """One run in a process of its own."""
    folder = out / f"{name}_{seed}"
    if (folder / "result.json").exists():
        return
    command = [sys.executable, HERE / "train.py", folder, "--force", "--steps", steps, "--seed", seed]
    command += ["--normalization", name, "--model", out / f"warm_start_{seed}.safetensors"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{folder}: {ended.stderr or ended.stdout}")


def collected(out: Path, seeds: int, steps: int, seconds: float) -> dict[str, Any]:
    """What all runs gave, and what they ran on."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in NORMALIZATIONS}
    for name, of_seeds in runs.items():
        for seed in range(seeds):
            folder = out / f"{name}_{seed}"
            history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
            result = json.loads((folder / "result.json").read_text())
            of_seeds.append({**result, "curve": [line["train/success"] for line in history]})
    first = json.loads((out / "rows_0" / "history.jsonl").read_text().splitlines()[0])
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "seconds": round(seconds),
        "steps": steps,
        "fan_out_mean": first["miles_norm/fan_out_mean"],
        "warm_start_steps": WARM_START_STEPS,
        "runs": runs,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval by Student's t."""
    return mean(values), T95[len(values) - 1] * stdev(values) / len(values) ** 0.5


def table(results: Mapping[str, Any]) -> str:
    """Success after training and over training, and the paired differences from normalizing rows."""
    lines = [
        "| normalization | success after training | less that of rows | success during training | less that of rows |",
        "|---|---|---|---|---|",
    ]
    after = {name: [run["after"][0] for run in runs] for name, runs in results["runs"].items()}
    during = {name: [mean(run["curve"]) for run in runs] for name, runs in results["runs"].items()}
    for name, title in NAMES.items():
        cells = [title]
        for values in (after, during):
            cells.append("{:.1%} ± {:.1%}".format(*interval(values[name])))
            paired = [ours - rows for ours, rows in zip(values[name], values["rows"], strict=True)]
            cells.append("" if name == "rows" else "{:+.1%} ± {:.1%}".format(*interval(paired)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(results: Mapping[str, Any], folder: Path, name: str = "results") -> None:
    """JSON, table and picture."""
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, folder / f"{name}.svg")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Success over the steps: the mean of the seeds and its interval, and what each run reached."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "miles_norm"
    import matplotlib.pyplot as plt

    figure, (curves, ends) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(3, 2))
    for place, (name, title) in enumerate(NAMES.items()):
        runs = results["runs"][name]
        columns = [interval(values) for values in zip(*(run["curve"] for run in runs), strict=True)]
        steps = range(1, len(columns) + 1)
        (line,) = curves.plot(steps, [middle for middle, _ in columns], label=title)
        low, high = [m - w for m, w in columns], [m + w for m, w in columns]
        curves.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        values = [run["after"][0] for run in runs]
        middle, width = interval(values)
        ends.errorbar([place], [middle], [width], color=line.get_color(), marker="o", capsize=4)
        ends.scatter([place + 0.15] * len(values), values, color=line.get_color(), s=12, alpha=0.6)
    curves.set(xlabel="step", title="success of the rollouts, 95% over seeds", ylim=(0, 1))
    curves.legend(fontsize=8, loc="lower right")
    ends.set(title="success after training (enlarged)", xticks=range(3))
    ends.set_xticklabels(["rows", "rollout adv.", "rollouts"], fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
