"""What ``rollout`` does once everything is checked: run the agent, keep what has finished, write it in any case."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console

from miles_norm.audit.summary import counted
from miles_norm.cli.background import Background, interruptions
from miles_norm.cli.terminal import show_lines
from miles_norm.cli.waiting import bar
from miles_norm.dumps import RolloutDump, write_dump
from miles_norm.errors import DumpError, SessionError, format_rows
from miles_norm.session.batch import Agent, Prompt, RolloutOptions
from miles_norm.storage.plain_values import json_line, plain_mapping

if TYPE_CHECKING:
    from miles_norm.cli.engines import EngineChoice
    from miles_norm.samples import Sample
    from miles_norm.session.engines.protocol import Engine

__all__ = ["Batch", "part_of", "roll_out", "write_batch"]

_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
"""What a batch that was told to end gets for it: agents 5 s, then the server and the engine."""
_BLOCKED_SECONDS = 15.0
"""How long the event loop may stand still beyond the time that a rollout may take."""


@dataclass
class Batch:
    """The rollouts of one command, as far as they have finished."""

    prompts: Sequence[Prompt]
    options: RolloutOptions
    rollouts: dict[int, Sequence[Sample]] = field(default_factory=dict)
    """Rows by number of the rollout."""
    interrupted: bool = False
    error: BaseException | None = None
    """What ended it before its rollouts did."""

    @property
    def total(self) -> int:
        """Rollouts that were asked for."""
        return len(self.prompts) * self.options.n_samples_per_prompt

    @property
    def rows(self) -> list[Sample]:
        """All rows, by prompt and rollout."""
        return [row for number in sorted(self.rollouts) for row in self.rollouts[number]]

    @property
    def aborted(self) -> int:
        """Rollouts whose agent did not come to an end."""
        from miles_norm.session.rollout import aborted_rollouts

        return sum(map(len, aborted_rollouts(self.rows).values()))

    def lacking(self) -> str:
        """What is not there, in words."""
        each = self.options.n_samples_per_prompt
        finished = Counter(number // each for number in self.rollouts)
        partly = [group for group in range(len(self.prompts)) if 0 < finished[group] < each]
        without = [group for group in range(len(self.prompts)) if not finished[group]]
        texts = [f"{len(self.rollouts)} of {counted(self.total, 'rollout')} had finished"]
        texts += [f"incomplete: {format_rows(partly, 'prompt group')}"] if partly else []
        texts += [f"without any: {format_rows(without, 'prompt group')}"] if without else []
        return "; ".join(texts)


def part_of(output: Path) -> Path:
    """Where the rows of finished rollouts are kept until all of them are written to ``output``."""
    return output.with_name(f"{output.name}.part.jsonl")


def roll_out(agent: Agent, batch: Batch, output: Path, server: str | None, choice: EngineChoice) -> None:
    """Run an agent on prompts, against a server that runs or one made for it, with a bar.

    It ends when the batch has ended, or soon after it was told to: agents run in another thread, which is not waited
    for. The rows of each rollout that finishes are in the batch, and in a file beside the output, at once.

    Raises:
        DumpError: the file beside the output cannot be made.
        MilesNormError: the engine cannot be made.
    """
    from miles_norm.session.rollout import check_complete, run_rollouts

    source = choice.make() if server is None else server
    finished: queue.SimpleQueue[Sequence[Sample]] = queue.SimpleQueue()

    async def work() -> None:
        async with _server(source, choice, batch.options.api_key) as address:
            await run_rollouts(agent, batch.prompts, address, batch.options, on_rollout=finished.put)

    with interruptions() as told, bar("rolling out") as progress, _keeping(part_of(output)) as keep:
        background = Background(work(), threads=batch.options.concurrency)
        end = float("inf")
        while not (background.ended.is_set() and finished.empty()):
            with suppress(queue.Empty):
                rows = finished.get(timeout=_POLL_SECONDS)
                keep(rows)
                number = rows[0].index
                assert isinstance(number, int)
                batch.rollouts[number] = rows
                if progress is not None:
                    progress(len(batch.rollouts), batch.total)
            if told.count and not batch.interrupted:
                batch.interrupted = True
                background.cancel()
            if batch.interrupted or len(batch.rollouts) == batch.total:
                end = min(end, time.monotonic() + _END_SECONDS)
            if told.count > 1 or time.monotonic() > end:
                return
            if _blocked(background, batch.options.timeout_seconds):
                batch.error = _blocks(background)
                return
    batch.error = background.error
    if batch.error is None and not batch.interrupted:
        try:
            check_complete(batch.rollouts, batch.total)
        except SessionError as error:
            batch.error = error


def _blocked(background: Background, timeout: float | None) -> bool:
    """Whether no rollout can end any more, although each should have."""
    return timeout is not None and background.stood_still > timeout + _BLOCKED_SECONDS


@contextmanager
def _keeping(path: Path) -> Iterator[_Keep]:
    """A function that appends the rows of a rollout to a file, where they are safe whatever happens to this process."""
    try:
        file = path.open("wb")
    except OSError as error:
        raise DumpError(
            f"output {path}",
            got=error.strerror or str(error),
            expected="a file that can be made beside the output",
            reason="the rows of finished rollouts are kept there until all are written",
            remedy="write elsewhere",
        ) from error
    with file:
        yield _Keep(file)


class _Keep:
    def __init__(self, file: IO[bytes]) -> None:
        self._file: IO[bytes] | None = file

    def __call__(self, rows: Sequence[Sample]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(b"".join(json_line(plain_mapping(row.to_dict(), keep_arrays=False)) for row in rows))
            self._file.flush()
        except OSError:
            # A disk that is full now may have room at the end, for the dump; what is in memory is not lost yet.
            self._file = None


@asynccontextmanager
async def _server(source: str | Engine, choice: EngineChoice, key: str | None) -> AsyncIterator[str]:
    """The address of a server that runs, or of one on an engine."""
    if isinstance(source, str):
        yield source
        return
    from miles_norm.session.engines.protocol import wait_until_ready
    from miles_norm.session.server import ServerConfig, running_server

    async with running_server(source, ServerConfig(port=0, api_key=key)) as own:
        await wait_until_ready(source, choice.ready_within)
        yield own


def write_batch(console: Console, batch: Batch, output: Path) -> None:
    """Write what has finished, and say what was written and what is lacking.

    Raises:
        DumpError: it cannot be written; the rows stay in the file beside it.
    """
    part = part_of(output)
    if batch.rollouts:
        try:
            write_dump(RolloutDump(samples=[row.to_dict() for row in batch.rows]), output)
        except BaseException:
            show_lines(console, f"finished rollouts are in {part}, a dump as well", head="kept: ", style="yellow")
            raise
        _show(console, batch, output)
    part.unlink(missing_ok=True)
    if batch.interrupted or batch.error is not None:
        head = "interrupted: " if batch.interrupted else "ended early: "
        nothing = "" if batch.rollouts else "; nothing was written"
        show_lines(console, batch.lacking() + nothing, head=head, style="yellow")


def _show(console: Console, batch: Batch, path: Path) -> None:
    fan_out = [len(rows) for rows in batch.rollouts.values()]
    text = f"{path}: {counted(sum(fan_out), 'row')} of {counted(len(fan_out), 'rollout')}, "
    text += f"fan-out {min(fan_out)} to {max(fan_out)}"
    text += f"; {counted(batch.aborted, 'rollout')} aborted, see metadata.error" if batch.aborted else ""
    show_lines(console, text, head="wrote ", style="green")


def _blocks(background: Background) -> SessionError:
    return SessionError(
        "event loop of the agents",
        got=f"no time for anything in {background.stood_still:.0f} s, at {background.place()}",
        expected="agents that await whatever takes time",
        reason="none of them can go on or be ended while one blocks the loop, with time.sleep or a synchronous client",
        remedy="put such calls into asyncio.to_thread",
    )
