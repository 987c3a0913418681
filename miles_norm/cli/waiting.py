"""Signs of life on stderr for work that lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from miles_norm.cli.terminal import console_for

if TYPE_CHECKING:
    from rich.status import Status

__all__ = ["bar", "status"]

PATIENCE = 1.0
"""Seconds before anything is shown."""

_REFRESH = 0.1


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a spinner with ``text`` while the body runs, once it has lasted a second and if stderr is a terminal."""
    console = console_for(stderr=True)
    if not console.is_interactive:
        yield
        return
    with _late(console.status(text)):
        yield


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback (done, in all) that moves a bar, shown as late as ``status``; None if stderr is no terminal."""
    console = console_for(stderr=True)
    if not console.is_interactive:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(text)
    last = 0.0

    def move(done: int, total: int) -> None:
        # Called per row, and an update costs as much as reading a short one.
        nonlocal last
        if (now := time.monotonic()) - last >= _REFRESH:
            last = now
            progress.update(task, completed=done, total=total)

    with _late(progress):
        yield move


@contextmanager
def _late(display: Status | Progress) -> Iterator[None]:
    timer = threading.Timer(PATIENCE, display.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        display.stop()
