"""An event loop that can be left to itself, for code of others that may never end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

__all__ = ["Background", "Interruptions", "exit_within", "interruptions"]

_BEAT_SECONDS = 0.25
_GRACE_SECONDS = 1.0
"""What tasks get to end once the work is done and they have been cancelled; then they are left."""


class Background:
    """One coroutine on an event loop in a thread of its own.

    The thread that made it stays free to look after what has been done so far, whatever the tasks and threads that the
    coroutine starts do: swallow their cancellation, block the loop, never end. Nobody waits for those.

    Args:
        work: The coroutine.
        threads: Of the loop's default executor, which ``asyncio.to_thread`` uses.
    """

    left_tasks: ClassVar[bool] = False
    """Whether any of them left a task that went on after it was cancelled."""

    def __init__(self, work: Coroutine[Any, Any, Any], threads: int) -> None:
        self.ended = threading.Event()
        """Set when the coroutine has ended, and all tasks have ended or were left."""
        self.error: BaseException | None = None
        """What the coroutine raised; None also where it was cancelled."""
        self._loop = asyncio.new_event_loop()
        self._beat = time.monotonic()
        self._task = self._loop.create_task(work)
        self._thread = threading.Thread(target=self._run, args=(threads,), name="rollouts", daemon=True)
        self._thread.start()

    @property
    def stood_still(self) -> float:
        """Seconds since the loop last had time for anything."""
        return time.monotonic() - self._beat

    def place(self) -> str:
        """The line of Python that the thread is at."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "no line"

    def cancel(self) -> None:
        """Ask the coroutine to end."""
        with suppress(RuntimeError):  # The loop is closed: it has ended.
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self, threads: int) -> None:
        loop, task = self._loop, self._task
        asyncio.set_event_loop(loop)
        executor = ThreadPoolExecutor(threads, "rollouts")
        loop.set_default_executor(executor)
        self._keep_beating()
        try:
            _run_until_done(loop, task)
            if not task.cancelled():
                self.error = task.exception() if task.done() else RuntimeError("an agent closed the event loop")
            if _end_tasks(loop):
                Background.left_tasks = True
            else:
                loop.close()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            self.ended.set()

    def _keep_beating(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT_SECONDS, self._keep_beating)


def _run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    while not task.done() and not loop.is_closed():
        # Any task that raises SystemExit or KeyboardInterrupt stops the loop. Whoever waits for that task is told as
        # well, once the loop goes on; what the task in hand raised is read from it.
        with suppress(BaseException):
            loop.run_until_complete(task)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """Cancel all tasks; those that went on."""
    if loop.is_closed():
        return set()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    ending = {*tasks, loop.create_task(loop.shutdown_asyncgens())}
    _run_until_done(loop, loop.create_task(_wait(ending)))
    return {task for task in ending if not task.done()}


async def _wait(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=_GRACE_SECONDS)


class Interruptions:
    """How often the process was told to end."""

    count = 0


@contextmanager
def interruptions() -> Iterator[Interruptions]:
    """Count SIGINT and SIGTERM while the block runs, instead of raising or ending; only where signals arrive."""
    told = Interruptions()

    def tell(*_: Any) -> None:
        told.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_within(seconds: float, code: int) -> None:
    """See to it that the process ends, although threads or tasks may be left that Python would wait for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if Background.left_tasks:
        os._exit(code)  # To be collected they would be closed, and may go on even then, when no other thread runs.
    if threading.active_count() > 1:
        timer = threading.Timer(seconds, os._exit, (code,))
        timer.daemon = True
        timer.start()
