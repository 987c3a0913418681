"""TRL's line of the parity table."""

import pytest
import trl_models  # noqa: F401  # skips where TRL is missing
from parity_batch import check_outcome

pytestmark = pytest.mark.integration


def test_the_line_of_trl() -> None:
    check_outcome("trl_outcome")
