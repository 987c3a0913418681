"""What the documents show is what the code does."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from miles_norm import NormalizationConfig
from miles_norm.config import EstimatorOptions, parse_yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SEMANTICS = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")


def printed_by(path: Path) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("name", ["unequal_fan_out.py", "record_sessions.py"])
def test_readme_example_is_the_shipped_example_and_prints_what_it_shows(name: str) -> None:
    example = ROOT / "examples" / name
    code = example.read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in README
    assert f"```text\n{printed_by(example)}```" in README


def test_table_of_defaults_lists_every_setting_with_its_default() -> None:
    table = SEMANTICS.split("## Defaults")[1].split("##")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|$", table, flags=re.MULTILINE))
    shown = {name: parse_yaml(value, "the table") for name, value in rows.items()}
    shown = {name: tuple(value) if isinstance(value, list) else value for name, value in shown.items()}
    defaults = NormalizationConfig().model_dump()
    options = defaults.pop("options")
    assert shown == defaults | {f"options.{name}": value for name, value in options.items()}


@pytest.mark.parametrize("name", sorted(re.findall(r"\]\(([^)#:]+)\)", README + SEMANTICS)))
def test_links_lead_to_files(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize("setting", sorted({*NormalizationConfig.model_fields, *EstimatorOptions.model_fields}))
def test_semantics_explains_every_setting_beyond_the_table(setting: str) -> None:
    rest = SEMANTICS.replace(SEMANTICS.split("## Defaults")[1].split("##")[0], "")
    documented_by_the_equations = {
        "std_epsilon",
        "std_ddof",
        "advantage_estimator",
        "device",
        "coerce_numeric_strings",
        "options",
        "k",
    }
    assert f"`{setting}" in rest or f"`options.{setting}" in rest or setting in documented_by_the_equations
