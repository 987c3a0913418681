"""Run the command line in-process, and write small dumps for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from miles_norm.cli import main


@pytest.fixture(name="run")
def fixture_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Run:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run


@pytest.fixture(name="jsonl")
def fixture_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def jsonl(*rows: dict[str, Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"response_length": 5, **row}) + "\n" for row in rows), encoding="utf-8")
        return path

    return jsonl
