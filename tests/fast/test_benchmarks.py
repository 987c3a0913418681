"""The page of figures: what is reached, what is missed and why, and nothing about whose machine it was."""

import importlib
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(name="run_all")
def fixture_run_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("run_all")
    for name in ("run_all", "targets"):
        sys.modules.pop(name, None)


def figures(lists: float, seconds: float) -> dict[str, Any]:
    profile = {"conversion": 40.0, "counting_masks": 20.0, "reading_fields": 5.0, "two_sums_of_lists": 80.0}
    arrays = {"times_faster": 200.0, "peak_share_of_payload": 0.004, "profile_ms": profile}
    return {
        "convert": {
            "rows": 2500, "plain_ms": 120.0, "lists": {"times_faster": lists, "profile_ms": profile}, "arrays": arrays,
            "decoding_s": {"lists": 1.0, "columns": 0.01},
        },
        "shard": {"schedule": {"seconds": seconds}, "small_cases": 1.0, "growth_exponent": 1.0},
    }  # fmt: skip


def runs(run_all: Any, found: dict[str, Any]) -> dict[str, Any]:
    made = {name: run_all.Run(name, f"output of {name}\n", each, 1.0) for name, each in found.items()}
    return made | {"session": run_all.Run("session", "", None, 0.0, "skipped: it needs the package uvicorn")}


def test_figures_that_miss_are_explained_by_their_profile(run_all: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = runs(run_all, figures(lists=2.8, seconds=0.2))
    lines = run_all.table(made)
    assert {target.benchmark for target, _ in lines} == {"convert", "shard"}
    missed = [target.label for target, value in lines if not target.met(value)]
    assert missed == ["from lists, times a plain conversion"]
    [text] = run_all.explanations(lines, made)
    # 120 / 20: what the ratio would be if nothing but the masks had to be counted.
    assert text.endswith("the ratio would be 6.0.")
    run_all.print_table(lines)
    printed = capsys.readouterr().out
    assert "2.80x  ≥ 3x        missed" in printed
    assert "0.20 s  ≤ 1 s" in printed


def test_a_figure_that_was_left_out_is_no_miss(run_all: Any) -> None:
    run = {"steps": 3, "kept_bytes_per_dump": 2.0, "one_dump_bytes": 8.0}
    found = {"audit": run_all.Run("audit", "", {"run": run, "page": None}, 1.0)}
    # Two further dumps of 2 bytes each, beside the 8 of one.
    assert [value for _, value in run_all.table(found)] == [0.5]
    found["audit"].figures["page"] = {"seconds": 2.5}
    assert [(value, target.met(value)) for target, value in run_all.table(found)] == [(2.5, False), (0.5, True)]


def test_the_page_holds_every_output_and_no_name_of_a_machine(run_all: Any) -> None:
    made = runs(run_all, figures(lists=3.5, seconds=2.0))
    text = run_all.page(run_all.table(made), made, full=False, picture=True)
    assert "| shard | schedule on 64 ranks | 2 s | ≤ 1 s | missed |" in text
    assert "output of convert" in text
    assert "skipped: it needs the package uvicorn" in text
    assert "](performance.svg)" in text
    assert "Missed, and why" not in text  # the schedule has no profile
    assert platform.node() not in text
    assert str(BENCHMARKS.parent) not in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0, "", "0"), (3.0, "x", "3x"), (2.846, "x", "2.85x"), (31.4, "", "31.4"), (847.3, "x", "847x")],
)
def test_numbers(run_all: Any, value: float, unit: str, text: str) -> None:
    assert run_all.shown(value, unit) == text


def test_margins(run_all: Any) -> None:
    faster = run_all.Target("a", "b", lambda f: 0.0, at_least=10)
    smaller = run_all.Target("a", "b", lambda f: 0.0, at_most=10)
    nothing = run_all.Target("a", "b", lambda f: 0.0, at_most=0)
    assert [run_all.margin(faster, value) for value in (100, 10, 1)] == [1.0, 0.0, -1.0]
    assert [run_all.margin(smaller, value) for value in (100, 10, 1)] == [-1.0, 0.0, 1.0]
    assert run_all.margin(nothing, 0) == 2.0


def test_every_figure_is_of_a_benchmark_of_its_own_name(run_all: Any) -> None:
    named = {(target.benchmark, target.label) for target in run_all.TARGETS}
    assert len(named) == len(run_all.TARGETS)
    assert {"audit", "convert", "loss_weights", "normalize", "ray_scale", "shard", "cli_scale"} <= set(run_all.names())
