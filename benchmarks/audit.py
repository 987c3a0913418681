"""How long is a run that an audit can take, and how large a dump whose page opens at once?

    python benchmarks/audit.py            200 dumps of 2,500 rows, then one of 100,000: some minutes
    python benchmarks/audit.py --short    10 dumps, then the same one
    python benchmarks/audit.py --json F   the figures to a file as well

``miles-norm audit`` reads the dumps of a run in a process of its own. Its peak memory is compared with that of an audit
of one of them, the floor being what three rows take: memory that holds the rows of one dump grows by no more than what
is kept of each. The page is opened from the disk in a real, headless Chromium, which ``CHROMIUM`` names, driven by
Playwright; its time ends once a prompt group is on the screen and the next frame was drawn. The baseline is an empty
page in the same browser. Without Playwright or a Chromium only the page is left out.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cli_scale import run, write_dump

STEP_ROWS, PAGE_ROWS, ROUNDS = 2_500, 100_000, 5
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def audit(*arguments: object) -> dict[str, Any]:
    """An audit that must end well."""
    found = run("audit", *arguments)
    assert found["code"] == 0, found["shown"][-2000:]
    return found


def long_run(folder: Path, steps: int) -> dict[str, float]:
    """Time and memory of an audit of many dumps, beside one of them and beside three rows."""
    paths = [folder / f"rollout_{number}.parquet" for number in range(steps)]
    for number, path in enumerate(paths):
        write_dump(path, STEP_ROWS, seed=number)
    write_dump(folder / "few.parquet", 3)
    floor, one, found = (
        audit(*some, "-o", folder / f"{name}.html")
        for name, some in {"few": [folder / "few.parquet"], "one": paths[:1], "all": paths}.items()
    )
    return {
        "steps": steps,
        "seconds": found["seconds"],
        "peak_bytes": found["peak_bytes"],
        "one_dump_bytes": one["peak_bytes"] - floor["peak_bytes"],
        "kept_bytes_per_dump": (found["peak_bytes"] - one["peak_bytes"]) / (steps - 1),
    }


def large_page(folder: Path) -> dict[str, float] | None:
    """Seconds until the report of a large dump is on the screen; None without a browser."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return None
    if chromium is None:
        return None
    write_dump(folder / "rows.parquet", PAGE_ROWS)
    report, empty = folder / "report.html", folder / "empty.html"
    made = audit(folder / "rows.parquet", "-o", report)
    empty.write_text("<!doctype html><title>empty</title><table><tr class=group><td>0</table>", encoding="utf-8")
    with sync_playwright() as driver:
        # Containers have no user namespaces for the sandbox; the pages are ours.
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = {path: [opening(browser, path) for _ in range(ROUNDS)] for path in (empty, report)}
        browser.close()
    return {
        "rows": PAGE_ROWS,
        "bytes": report.stat().st_size,
        "audit_seconds": made["seconds"],
        "seconds": statistics.median(opened[report]),
        "slowest_seconds": max(opened[report]),
        "empty_seconds": statistics.median(opened[empty]),
    }


def opening(browser: Any, path: Path) -> float:
    page = browser.new_page()
    began = time.perf_counter()
    page.goto(path.resolve().as_uri())
    page.locator("tr.group").first.wait_for()
    page.evaluate(DRAWN)
    took = time.perf_counter() - began
    page.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="10 dumps instead of 200")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        steps = long_run(Path(name), 10 if options.short else 200)
        print(f"{steps['steps']} dumps of {STEP_ROWS} rows: {steps['seconds']:.1f} s, ", end="")
        print(f"peak memory {steps['peak_bytes'] / 1e6:.0f} MB")
        print(f"  the first takes {steps['one_dump_bytes'] / 1e6:.1f} MB above three rows, ", end="")
        print(f"each further one adds {steps['kept_bytes_per_dump'] / 1e3:.0f} KB")
        page = large_page(Path(name))
    if page is None:
        print("no page was opened: that needs the package playwright and a Chromium")
    else:
        print(f"page of {page['rows']} rows, {page['bytes'] / 1e6:.1f} MB, made in {page['audit_seconds']:.1f} s:")
        print(f"  on the screen after {page['seconds']:.2f} s, {page['slowest_seconds']:.2f} at most; ", end="")
        print(f"an empty page takes {page['empty_seconds']:.2f} s")
    if options.json:
        options.json.write_text(json.dumps({"run": steps, "page": page}, indent=2))


if __name__ == "__main__":
    main()
