"""Run every benchmark, print its figures beside what is asked for, and write them down: JSON, a picture, a page.

    python benchmarks/run_all.py                a short set, some minutes: what `make bench` runs
    python benchmarks/run_all.py --full         full sizes, half an hour
    python benchmarks/run_all.py normalize      some of them, by name
    python benchmarks/run_all.py --docs         docs/performance.md and docs/performance.svg as well

Each benchmark measures its own baseline in the same run, so that figures are ratios wherever they can be. One that
lacks a package is skipped, and says which. The picture needs matplotlib, the extra "plots".
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from targets import TARGETS, Target

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGES = ("torch", "numpy", "pyarrow", "safetensors", "ray", "starlette", "uvicorn", "aiohttp")
LIMIT_S = 900


@dataclass
class Run:
    """What one benchmark did."""

    name: str
    output: str
    figures: dict[str, Any] | None
    """None where it did not run to its end."""
    seconds: float
    problem: str = ""


def names() -> list[str]:
    own = {"memory", "run_all", "targets"}
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in own)


def run(name: str, *, full: bool) -> Run:
    print(f"\n== {name}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path), *([] if full else ["--short"])]
        # On a busy machine threads that wait for each other cost many times the work that they share.
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=env)
        except subprocess.TimeoutExpired:
            return Run(name, "", None, LIMIT_S, f"stopped after {LIMIT_S} s")
        figures = json.loads(path.read_text()) if done.returncode == 0 else None
    print(done.stdout, end="", flush=True)
    problem = ""
    if done.returncode:
        lacking = re.findall(r"No module named '([^']+)'", done.stderr)
        problem = f"skipped: it needs the package {lacking[-1]}" if lacking else f"failed: {last_line(done.stderr)}"
        print(problem)
    return Run(name, done.stdout, figures, time.perf_counter() - began, problem)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def reached(target: Target, runs: dict[str, Run]) -> float | None:
    """The figure; None if its benchmark has not run, or left it out."""
    found = runs.get(target.benchmark)
    value = None if found is None or found.figures is None else target.value(found.figures)
    return None if value is None else float(value)


def table(runs: dict[str, Run]) -> list[tuple[Target, float]]:
    values = ((target, reached(target, runs)) for target in TARGETS)
    return [(target, value) for target, value in values if value is not None]


def shown(value: float, unit: str) -> str:
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{unit}"


def print_table(lines: list[tuple[Target, float]]) -> None:
    print(f"\n{'':<16} {'':<52} {'reached':>10}  {'asked for':<10}")
    for target, value in lines:
        missed = "" if target.met(value) else "  missed"
        print(f"{target.benchmark:<16} {target.label:<52} {shown(value, target.unit):>10}  {target.asked:<10}{missed}")


def explanations(lines: list[tuple[Target, float]], runs: dict[str, Run]) -> list[str]:
    texts = []
    for target, value in lines:
        if target.met(value) or target.why_missed is None:
            continue
        figures = runs[target.benchmark].figures or {}
        texts.append(f"{target.benchmark}, {target.label} ({shown(value, target.unit)}): {target.why_missed(figures)}")
    return texts


def machine() -> list[str]:
    """What ran the benchmarks; no names of machines, no paths."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next(iter(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    load = os.getloadavg()[0]
    return [
        f"{os.cpu_count()} cores of {cpu.strip()}, {memory:.0f} GiB, {platform.system()}, no GPU",
        f"Python {platform.python_version()}, {', '.join(versions)}",
        f"one thread each, at a load average of {load:.1f}",
    ]


def draw(lines: list[tuple[Target, float]], runs: dict[str, Run], path: Path) -> bool:
    """Growth of what grows, and how far each figure is from what is asked for; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no picture: it needs the package matplotlib")
        return False
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "miles_norm", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=(2, 3), layout="constrained")
    for label, points in growths(runs).items():
        rows, seconds = zip(*points, strict=True)
        left.loglog(rows, [s * 1e3 for s in seconds], "--" if "copy" in label else "o-", label=label)
    left.set(xlabel="rows", ylabel="ms", title="Time over rows")
    if left.lines:
        left.legend()
    margins = [margin(target, value) for target, value in lines]
    labels = [f"{target.benchmark}: {target.label}" for target, _ in lines]
    colors = ["tab:green" if target.met(value) else "tab:red" for target, value in lines]
    right.barh(range(len(margins)), margins, color=colors, left=0)
    right.set_yticks(range(len(labels)), labels, fontsize=7)
    right.invert_yaxis()
    right.axvline(0, color="black", linewidth=0.8)
    right.set(xlabel="factor from the bound, log10; right of 0 it is met", title="Figures and what is asked for")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def growths(runs: dict[str, Run]) -> dict[str, list[Any]]:
    """Rows and seconds of what was measured at several sizes."""
    found = {name: one.figures["growth"] for name, one in runs.items() if "growth" in (one.figures or {})}
    lines = {"a copy of the columns": found["normalize"]["copy"]} if "normalize" in found else {}
    lines |= {"normalization": found["normalize"]["ours"]} if "normalize" in found else {}
    return lines | ({"schedule of shards": found["shard"]} if "shard" in found else {})


def margin(target: Target, value: float) -> float:
    """log10 of the factor by which a bound is met, within -2 and 2; nothing is infinitely good."""
    import math

    if target.at_least is not None:
        ratio = value / target.at_least
    else:
        ratio = (target.at_most or 0.0) / value if value else math.inf
    return max(-2.0, min(2.0, math.log10(ratio))) if ratio > 0 else -2.0


def page(lines: list[tuple[Target, float]], runs: dict[str, Run], *, full: bool, picture: bool) -> str:
    text = [
        "# Performance",
        "",
        "Written by `python benchmarks/run_all.py --docs` from one run; what it says is what was measured. Baselines",
        "are measured in the same run, so that ratios hold on other machines where times do not.",
        "",
        *(f"- {line}" for line in machine()),
        f"- sizes: {'full' if full else 'short, as `make bench` runs them'}",
        "",
        "| benchmark | figure | reached | asked for | |",
        "|---|---|---|---|---|",
    ]
    for target, value in lines:
        missed = "" if target.met(value) else "missed"
        text.append(
            f"| {target.benchmark} | {target.label} | {shown(value, target.unit)} | {target.asked} | {missed} |"
        )
    if picture:
        text += ["", "![Time over rows, and how far each figure is from its bound](performance.svg)"]
    missed = explanations(lines, runs)
    if missed:
        text += ["", "## Missed, and why", "", *(f"- {line}" for line in missed)]
    text += ["", "## What each benchmark printed"]
    for found in runs.values():
        said = found.output.rstrip() or found.problem
        text += ["", f"### {found.name}", "", "```text", *said.splitlines(), "```"]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; all by default")
    parser.add_argument("--full", action="store_true", help="full sizes")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md and its picture")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder for figures and picture")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names())}")
    runs = {name: run(name, full=options.full) for name in options.names or names()}
    lines = table(runs)
    print_table(lines)
    if not options.full:
        print("\nAt short sizes what does not grow with the rows weighs more; docs/performance.md has the full ones.")
    for text in explanations(lines, runs):
        print(f"\n{text}")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = {name: found.figures for name, found in runs.items()}
    (options.out / "figures.json").write_text(json.dumps(kept, indent=2))
    picture = draw(lines, runs, options.out / "performance.svg")
    if options.docs:
        text = page(lines, runs, full=options.full, picture=picture)
        (ROOT / "docs" / "performance.md").write_text(text, encoding="utf-8")
        if picture:
            (ROOT / "docs" / "performance.svg").write_bytes((options.out / "performance.svg").read_bytes())
    failed = [found.name for found in runs.values() if found.problem and not found.problem.startswith("skipped")]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
