"""What docs/integrations shows is what the code does."""

import contextlib
import io
import re
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_norm.integrations import agent_lightning, miles_flags

ROOT = Path(__file__).parents[3]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/integrations").glob("*.md"))}
OWN = ["miles", "slime", "agent_lightning", "custom_trainer"]


def test_the_custom_trainer_is_the_shipped_example_learns_and_prints_what_is_shown() -> None:
    example = ROOT / "examples/custom_trainer.py"
    code = example.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 40
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(example), run_name="__main__")
    rewards = [float(line.rpartition(" ")[2]) for line in output.getvalue().splitlines()]
    # Sampling by chance is right one time in four.
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.9
    body = code.split('"""\n\n', 1)[1]
    assert f"```python\n{body}```\n\n```text\n{output.getvalue()}```" in PAGES["custom_trainer"]


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_functions_lead_to_functions(page: str) -> None:
    """What a user copies into a flag is what the trainer will import."""
    for path in set(re.findall(r"(?<![\w.])miles_norm(?:\.\w+)+", PAGES[page])):
        module, _, name = path.rpartition(".")
        package = import_module(module)
        is_module = hasattr(package, "__path__") and find_spec(path) is not None
        assert is_module or callable(getattr(package, name))


@pytest.mark.parametrize("page", OWN)
def test_every_page_answers_the_same_questions(page: str) -> None:
    headings = re.findall(r"^## (.*)$", PAGES[page], flags=re.MULTILINE)
    assert {"Install", "What changes", "What is refused, and why", "What cannot be expressed"} <= set(headings)


@pytest.mark.parametrize("page", ["miles", "slime", "verl", "agent_lightning", "trl"])
def test_every_framework_has_an_install_one_line_and_what_changes(page: str) -> None:
    headings = re.findall(r"^## (Install|One (?:flag|line)|What changes)", PAGES[page], flags=re.MULTILINE)
    assert [heading.split()[0] for heading in headings] == ["Install", "One", "What"]


def test_flags_and_variables_are_named() -> None:
    for word in (*miles_flags.FLAGS.values(), miles_flags.CONFIG_VARIABLE, miles_flags.LOSS_CONFIG_VARIABLE):
        assert word in PAGES["miles"]
    for estimator in agent_lightning._ESTIMATORS:
        assert f"`{estimator}`" in PAGES["agent_lightning"]
