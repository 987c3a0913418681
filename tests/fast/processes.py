"""Programs that tests start, and that end with the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAST = Path(__file__).parent
SECONDS = 60


class Process:
    """A Python program that prints what others wait for."""

    def __init__(self, script: Path, *arguments: object) -> None:
        path = os.pathsep.join([str(FAST), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line that it prints; empty once it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        return self._process.wait(SECONDS)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=SECONDS)


@contextmanager
def running(script: Path, *arguments: object) -> Iterator[Process]:
    """The program while the block runs."""
    process = Process(script, *arguments)
    try:
        yield process
    finally:
        process.end()
