"""verl's line of the parity table."""

import pytest
import verl_rows  # noqa: F401  # skips where verl is missing
from parity_batch import check_outcome

pytestmark = pytest.mark.integration


def test_the_line_of_verl() -> None:
    check_outcome("verl_outcome")
