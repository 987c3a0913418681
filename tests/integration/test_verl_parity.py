"""verl's line of the parity table."""

from pathlib import Path

import pytest
import verl_rows  # noqa: F401  # skips where verl is missing
from doc_scripts import imported

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_the_line_of_verl() -> None:
    with imported(ROOT / "docs/integrations/parity.py") as parity:
        (line,) = parity.table(tuple(i for i in parity.INTEGRATIONS if i.package == "verl")).splitlines()[2:]
    assert "| same bits |" in line
    assert line.endswith("same to 1e-6 |")
    assert line in (ROOT / "docs/integrations/parity.md").read_text(encoding="utf-8")
