"""What the documents show is what the code does."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT

from miles_norm import NormalizationConfig
from miles_norm.config import EstimatorOptions, parse_yaml

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """Those of the guides stay within docs, where the site has them; other files are named by their path."""
    for name, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))):
        target = (page.parent / name).resolve() if name else page
        assert target.is_file()
        assert page.name == "README.md" or target.is_relative_to(ROOT / "docs")
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


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


def test_picture_of_the_concepts_shows_what_the_page_computes() -> None:
    page, picture = ((ROOT / f"docs/concepts.{kind}").read_text(encoding="utf-8") for kind in ("md", "svg"))
    shown = re.findall(r">([^<>\n]+)</text>", picture)
    advantages, weights = (re.search(rf"^\[({begin}, .*)\]$", page, flags=re.MULTILINE) for begin in ("-0.667", "36"))
    assert advantages is not None
    assert weights is not None
    assert [text for text in shown if re.match(r"−?0\.", text)] == advantages[1].replace("-", "−").split(", ")
    assert [text for text in shown if text.startswith("1 / ")] == [f"1 / {n}" for n in weights[1].split(", ")]
