"""What ``normalize -o`` writes: the rows of the dump, each with its advantage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_norm.cli.inputs import kept_warnings
from miles_norm.cli.waiting import bar
from miles_norm.errors import DumpError, format_rows

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch

__all__ = ["ADDED_KEYS", "check_output", "write_output"]

ADDED_KEYS = ("advantage", "trained", "rollout_reward")


def check_output(path: Path, dump: Path, *, force: bool) -> None:
    """Refuse, before any work, to write over a file.

    Raises:
        DumpError: ``path`` exists, and ``force`` is not set.
    """
    if force or not path.exists():
        return
    same = dump.exists() and path.samefile(dump)
    raise DumpError(
        f"output {path}",
        got="the input file" if same else "a file that exists",
        expected="a new file",
        reason="what it holds would be lost",
        remedy="name another file, or pass --force to replace this one",
    )


def write_output(batch: Batch, path: Path, *, force: bool) -> list[str]:
    """Write the dump with ``advantage``, ``trained`` and ``rollout_reward`` added to each row; return warnings.

    Raises:
        DumpError: rows have such a key already and ``force`` is not set; the file cannot be written.
    """
    from miles_norm.dumps import RolloutDump, write_dump

    samples, result = batch.dump.samples, batch.result
    taken = [row for row, sample in enumerate(samples) if not sample.keys().isdisjoint(ADDED_KEYS)]
    if taken and not force:
        present = sorted({key for row in taken for key in ADDED_KEYS if key in samples[row]})
        raise DumpError(
            f"output {path}",
            got=f"{format_rows(taken)} with the {'key' if len(present) == 1 else 'keys'} {', '.join(present)}",
            expected=f"rows without {', '.join(ADDED_KEYS)}",
            reason="values that the dump recorded under these names would be lost",
            remedy="rename the keys in the dump, or pass --force to replace them",
            rows=taken,
        )
    rewards = result.rollout_rewards[result.index.row_rollout].tolist()
    columns = zip(samples, result.advantages.tolist(), result.trained_rows.tolist(), rewards, strict=True)
    rows = [
        {**sample, "advantage": advantage, "trained": trained, "rollout_reward": None if reward != reward else reward}
        for sample, advantage, trained, reward in columns
    ]
    with kept_warnings() as warnings, bar(f"writing {path.name}") as progress:
        write_dump(RolloutDump(rows, batch.dump.rollout_id, batch.dump.metadata), path, progress=progress)
    return warnings
