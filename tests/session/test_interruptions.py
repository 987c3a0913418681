"""``miles-norm rollout`` as a process whose agents do not end, and which is told to: what has finished is written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import SECONDS

from miles_norm import read_dump
from miles_norm.cli import main

PROCESS = Path(__file__).parent / "rollout_process.py"


class Rolling:
    """The command at work: two rollouts of each prompt, all at once unless said otherwise."""

    def __init__(self, folder: Path, prompts: Sequence[str], *arguments: object) -> None:
        self.out, self._marks = folder / "out.jsonl", folder / "marks"
        self.part = folder / "out.jsonl.part.jsonl"
        self._marks.mkdir(exist_ok=True)
        (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        command = (
            "rollout", "--agent", f"{PROCESS}:agent", "--prompts", folder / "prompts.jsonl", "-o", self.out,
            "--n-samples-per-prompt", 2, *arguments,
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "MARKS": str(self._marks), "COLUMNS": "1000"},
        )  # fmt: skip

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def until_begun(self, prompt: str, rollouts: int = 2) -> None:
        """So many rollouts of the prompt have made their turn."""
        self.until(lambda: len(list(self._marks.glob(f"{prompt}-*"))) >= rollouts)

    def until_kept(self, rollouts: int) -> None:
        """The rows of so many are safe."""
        self.until(lambda: self.part.exists() and self.part.read_bytes().count(b"\n") >= rollouts)

    def end(self) -> tuple[int, str]:
        """Exit code and what it said."""
        _, said = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, said

    def rows(self) -> list[dict[str, Any]]:
        return read_dump(self.out).samples


Roll = Callable[..., Rolling]


@pytest.fixture(name="roll")
def fixture_roll(tmp_path: Path) -> Iterator[Roll]:
    started: list[Rolling] = []

    def roll(*arguments: Any) -> Rolling:
        started.append(Rolling(tmp_path, *arguments))
        return started[-1]

    yield roll
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=SECONDS)


def test_agents_that_do_not_end_are_abandoned_and_named(roll: Roll) -> None:
    """Those that swallow their cancellation, sit in a thread, raise out of the loop, or stop it: the others go on."""
    faults = {
        "swallows": "no end after 2 s; it went on after it was cancelled, and was abandoned",
        "swallows all": "no end after 2 s",
        "thread": "no end after 2 s",
        "exits": "SystemExit: usage",
        "interrupts": "KeyboardInterrupt",
        "task exits": "SystemExit: usage",
        "task interrupts": "KeyboardInterrupt",
    }
    others = ["fine", "own thread", "stops the loop"]
    rolling = roll([*faults, *others], "--timeout", 2)
    code, said = rolling.end()
    assert code == 0, said
    errors = {row["rollout_id"]: row["metadata"].get("error") for row in rolling.rows()}
    assert errors == dict(enumerate([error for error in [*faults.values(), *[None] * 3] for _ in range(2)]))
    assert "warning: 2 rollouts were aborted: no end after 2 s; it went on after it was cancelled, and was" in said
    assert "4 rollouts were aborted: no end after 2 s (rollouts 2, 3, 4, 5)" in said
    assert "wrote " in said
    assert not rolling.part.exists()


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("waits", signal.SIGTERM),
        *((name, signal.SIGINT) for name in ("swallows", "swallows all", "thread", "own thread")),
    ],
)
def test_what_has_finished_is_written_when_it_is_told_to_end(roll: Roll, fault: str, number: int) -> None:
    # One rollout of "waits" never ends, so that something is always lacking.
    rolling = roll(["fine", fault, "waits"])
    rolling.until_begun(fault)
    rolling.until_begun("waits")
    finished = 4 if fault == "own thread" else 2
    rolling.until_kept(finished)
    rolling.process.send_signal(number)
    code, said = rolling.end()
    assert code == 130, said
    assert [row["rollout_id"] for row in rolling.rows()] == list(range(finished))
    assert {row["reward"] for row in rolling.rows()} == {1.0}
    without = "prompt group 2" if finished == 4 else "prompt groups 1, 2"
    assert f"interrupted: {finished} of 6 rollouts had finished; without any: {without}" in said
    assert "Traceback" not in said
    assert main(["normalize", str(rolling.out)]) == 0


def test_groups_that_lack_some_of_their_rollouts_are_named(roll: Roll) -> None:
    # One at a time: the second rollout of "waits" never begins, and of "fine" both end.
    rolling = roll(["fine", "once", "fine"], "--concurrency", 1)
    rolling.until_kept(3)
    rolling.process.send_signal(signal.SIGINT)
    code, said = rolling.end()
    assert code == 130, said
    assert "3 of 6 rollouts had finished; incomplete: prompt group 1; without any: prompt group 2" in said
    assert [row["rollout_id"] for row in rolling.rows()] == [0, 1, 2]


def test_an_agent_that_blocks_the_loop_does_not_keep_it(roll: Roll) -> None:
    """Neither Ctrl-C, of which the second one waits for nothing more, nor the time that a rollout may take."""
    rolling = roll(["fine", "blocks"], "--concurrency", 1)
    rolling.until_kept(2)
    rolling.until_begun("blocks", 1)
    for _ in range(2):
        rolling.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    code, said = rolling.end()
    assert code == 130, said
    assert "2 of 4 rollouts had finished" in said
    assert [row["rollout_id"] for row in rolling.rows()] == [0, 1]


def test_an_agent_that_blocks_the_loop_beyond_its_time(roll: Roll) -> None:
    rolling = roll(["fine", "blocks"], "--concurrency", 1, "--timeout", 1)
    code, said = rolling.end()
    assert code == 2, said
    assert "ended early: 2 of 4 rollouts had finished; without any: prompt group 1" in said
    assert "event loop of the agents\n  got:      no time for anything in " in said
    assert f"{PROCESS}:" in said
    assert [row["rollout_id"] for row in rolling.rows()] == [0, 1]


def test_told_to_end_before_anything_has_finished(roll: Roll) -> None:
    rolling = roll(["waits"])
    rolling.until_begun("waits")
    rolling.process.send_signal(signal.SIGINT)
    code, said = rolling.end()
    assert code == 130
    assert "0 of 2 rollouts had finished; without any: prompt group 0; nothing was written" in said
    assert not rolling.out.exists()
    assert not rolling.part.exists()


def test_a_process_that_is_killed_leaves_a_dump_beside_the_output(roll: Roll) -> None:
    rolling = roll(["fine", "waits"])
    rolling.until_kept(2)
    rolling.process.kill()
    rolling.end()
    assert not rolling.out.exists()
    assert sorted(row["rollout_id"] for row in read_dump(rolling.part).samples) == [0, 1]
    code, said = roll(["fine"]).end()
    assert code == 2
    assert f"output {rolling.part}\n  got:      a file that exists" in said
    code, said = roll(["fine"], "--force").end()
    assert code == 0, said
    assert not rolling.part.exists()


def test_a_server_that_fails_late(roll: Roll, tmp_path: Path) -> None:
    """What has finished is written, and the failure is the end of the command."""
    server = subprocess.Popen(
        [sys.executable, "-c", "from miles_norm.cli import main; main()", "serve", "--set", "port=0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        address = server.stderr.readline().split()[1].removesuffix("/sessions")
        rolling = roll(["fine", "waits", "fine"], "--server", address, "--concurrency", 3, "--timeout", 3)
        rolling.until_kept(2)
        rolling.until_begun("waits", 1)
    finally:
        server.kill()
        server.communicate(timeout=SECONDS)
    code, said = rolling.end()
    assert code == 2, said
    assert "ended early: " in said
    assert f"{address}/sessions" in said
    assert {row["rollout_id"] for row in rolling.rows()} >= {0, 1}
    assert [row["reward"] for row in rolling.rows() if row["rollout_id"] < 2] == [1.0, 1.0]
