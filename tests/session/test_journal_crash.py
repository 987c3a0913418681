"""Real processes: a journal whose writer is killed, and one whose disk is full."""

import asyncio
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_norm.session.store import Journal, SyncMode

WRITER = Path(__file__).parent / "journal_writer.py"
SECONDS = 60


def writer(*arguments: object, before: list[str] | None = None, preexec: Callable[[], None] | None = None):
    command = [*(before or []), sys.executable, str(WRITER), *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, preexec_fn=preexec
    )


def replayed(path: Path) -> dict[str, list[str]]:
    """The first word of each record, by session."""
    journal = Journal(path)
    found: dict[str, list[str]] = {}
    for record in journal.replay():
        found.setdefault(record.session_id, []).append(record.payload.split(b" ")[0].decode())
    asyncio.run(journal.close())
    return found


@pytest.mark.parametrize("sync", ["full", "normal", "off"])
def test_every_acknowledged_record_survives_sigkill(tmp_path: Path, sync: SyncMode) -> None:
    path, acknowledged = tmp_path / "journal", {}
    for killed_after in (2_000, 500):
        process = writer(path, sync, "sessions", 200)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(killed_after)]
        process.send_signal(signal.SIGKILL)
        # What stood in the pipe was acknowledged too; a last line may be cut.
        lines += process.stdout.read().splitlines(keepends=True)
        assert process.wait(SECONDS) == -signal.SIGKILL
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()
        for line in lines:
            if line.endswith("\n"):
                name, turn = line.split()
                acknowledged.setdefault(name, []).append(turn)
        found = replayed(path)
        assert len(acknowledged) == 200
        for name, turns in acknowledged.items():
            # Those whose acknowledgement died with the process are there as well, at the end.
            held = found[name]
            assert held[: len(turns)] == turns
            assert held[len(turns) :] in ([], [str(int(turns[-1]) + 1)])
        acknowledged = found


def fill_until_full(process: "subprocess.Popen[str]") -> tuple[list[str], str]:
    assert process.stdout is not None
    turns = []
    while (line := process.stdout.readline()).startswith("s "):
        turns.append(line.split()[1])
    return turns, line


def append_one_more_and_close(process: "subprocess.Popen[str]") -> None:
    """The process is left waiting for the end of its input."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    assert process.stdout.readline() == "closed\n"


def end(process: "subprocess.Popen[str]") -> None:
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The limit of a process on the size of its files: the system refuses the write, SQLite calls it an I/O error."""
    path = tmp_path / "journal"
    limit = 1_000_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    process = writer(path, "normal", "fill", 10_000, preexec=limited)
    turns, failure = fill_until_full(process)
    assert 10 < len(turns) < limit / 10_000
    assert "(SQLITE_IOERR_WRITE)" in failure
    assert "what could not be written must not be acknowledged" in failure
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    append_one_more_and_close(process)
    end(process)
    assert replayed(path) == {"s": [*turns, "last"]}


# A file system of 2 MB that only the process and its children see.
SMALL_DISK = 'mount -t tmpfs -o size=2m tmpfs "$0" && head -c 1000000 /dev/zero > "$0/ballast" && exec "$@"'


@pytest.mark.parametrize("sync", ["full", "normal"])
def test_a_full_disk(tmp_path: Path, sync: SyncMode) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(disk)]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here: no user namespaces")
    process = writer(disk / "journal", sync, "fill", 10_000, before=unshare)
    turns, failure = fill_until_full(process)
    assert 10 < len(turns) < 100
    assert "database or disk is full (SQLITE_FULL)" in failure
    assert "remedy: make room; the journal then goes on by itself" in failure
    # The disk as the process sees it: make room, and take the journal from it at the end.
    seen = Path(f"/proc/{process.pid}/root{disk}")
    (seen / "ballast").unlink()
    append_one_more_and_close(process)
    shutil.copytree(seen, tmp_path / "copy")
    end(process)
    assert replayed(tmp_path / "copy" / "journal") == {"s": [*turns, "last"]}
