"""What docs/loss.md and the README show of the loss is what the code does."""

import contextlib
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from doc_scripts import imported

from miles_norm import LossConfig, UpdateConfig, loss

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/loss.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", name="plots")
def fixture_plots() -> Iterator[ModuleType]:
    with imported(ROOT / "docs/loss_plots.py") as module:
        yield module


def test_table_of_epochs_is_what_the_script_computes(plots: ModuleType) -> None:
    assert plots.table() in PAGE


@pytest.mark.parametrize("fan_out", [1, 2, 3, 4, 5])
def test_what_the_page_says_of_the_table(plots: ModuleType, fan_out: int) -> None:
    whole, by_rows, by_batch, floored, capped = (plots.epoch(case, fan_out) for case in plots.CASES)
    n = 8 * fan_out
    assert (whole.rows, whole.dropped_rows, whole.updates) == (n, 0, 2)
    assert (whole.mass, whole.sgd, whole.adam) == pytest.approx((2, 2, 2), rel=1e-6)
    assert (by_rows.mass, by_rows.sgd, by_rows.adam) == pytest.approx((n / 4, n / 4, n / 4), rel=1e-6)
    assert (by_batch.mass, by_batch.sgd, by_batch.adam) == pytest.approx((8 / n, 8 / n, n / 4), rel=1e-3)
    assert (floored.updates, floored.dropped_rows) == (n // 7, n % 7)
    assert (capped.updates, capped.dropped_rows) == (2, n - 8)
    assert capped.adam == pytest.approx(2, rel=0.05)
    assert fan_out == 1 or capped.sgd > 8 / n + 0.05
    for epoch in (whole, by_rows, by_batch, floored, capped):
        assert epoch.sgd == pytest.approx(epoch.mass, rel=1e-12)  # every gradient is 1


def test_the_picture_is_there_and_shows_every_case(plots: ModuleType) -> None:
    picture = (ROOT / "docs/loss_divisor.svg").read_text(encoding="utf-8")
    assert "](loss_divisor.svg)" in PAGE
    assert [case.name for case in plots.CASES if case.name not in picture] == []


def test_readme_step_is_the_shipped_example_and_prints_what_it_shows() -> None:
    example = ROOT / "examples/training_step.py"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(example), run_name="__main__")
    code = example.read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert f"```python\n{code}```\n\n```text\n{output.getvalue()}```" in README


def test_the_page_names_every_setting_aggregation_and_loss() -> None:
    settings = {*LossConfig.model_fields, *UpdateConfig.model_fields} - {"max_tokens", "seed", "nominal_rollouts"}
    aggregations = get_args(LossConfig.model_fields["aggregation"].annotation)
    named = set(re.findall(r"`([a-z_]+)", PAGE))
    assert settings - named == set()
    assert set(aggregations) - named == set()
    losses = {name for name in loss.__all__ if name.endswith("_loss") or name.startswith("truncated")}
    assert losses - named == set()
