"""Settings files in the environment, as a launcher puts them there."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def fixture_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell may have set."""
    for variable in ("MILES_NORM_CONFIG", "MILES_NORM_LOSS_CONFIG"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(name="settings")
def fixture_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write YAML into a file and name it in MILES_NORM_CONFIG, or in another variable."""

    def name_file(text: str, variable: str = "MILES_NORM_CONFIG") -> None:
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv(variable, str(path))

    return name_file
