"""What docs/evidence.md says is what the runs beside it gave."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny_agent"))

from compare import DOCS, END, START, interval, table

RESULTS = json.loads((DOCS / "evidence.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_table_of_the_committed_runs() -> None:
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    assert page.split(START)[1].split(END)[0] == table(RESULTS)


def test_every_seed_began_alike_and_ran_as_long_under_each_normalization() -> None:
    runs = RESULTS["runs"]
    assert set(runs) == {"rows", "rollout_advantages", "rollouts"}
    before = [[run["before"] for run in of_seeds] for of_seeds in runs.values()]
    assert before[0] == before[1] == before[2]
    assert len(before[0]) >= 5
    assert {len(run["curve"]) for of_seeds in runs.values() for run in of_seeds} == {RESULTS["steps"]}


def test_intervals() -> None:
    # 1, 2, 3: mean 2, standard deviation 1; with 2 degrees of freedom t is 4.303, and 4.303 / sqrt(3) = 2.484.
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.484, abs=1e-3))


def test_differences_are_paired_by_seed() -> None:
    # 0.1 and 0.2 apart, however far the seeds are: 0.15 +- 12.706 * 0.0707 / sqrt(2).
    def runs(*after: float) -> list[dict]:
        return [{"after": [value, 0.0, 240], "curve": [value]} for value in after]

    shown = table({"runs": {"rows": runs(0.1, 0.7), "rollout_advantages": runs(0.1, 0.7), "rollouts": runs(0.2, 0.9)}})
    rows, same, ours = shown.splitlines()[2:]
    assert rows.split(" | ")[1:3] == ["40.0% ± 381.2%", ""]
    assert same.split(" | ")[2] == "+0.0% ± 0.0%"
    assert ours.split(" | ")[2] == "+15.0% ± 63.5%"
