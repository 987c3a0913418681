"""What ``normalize -o`` writes: the rows of the dump, each with its advantage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_norm.cli.inputs import ADDED_KEYS, kept_warnings
from miles_norm.cli.waiting import bar
from miles_norm.errors import DumpError, format_rows
from miles_norm.storage.atomic import ending_of, is_there

if TYPE_CHECKING:
    from miles_norm.cli.inputs import Batch
    from miles_norm.storage.table import StoredColumn

__all__ = ["check_output", "write_output"]


def check_output(path: Path, dump: Path, endings: Sequence[str], *, force: bool) -> None:
    """Refuse, before any work, what could not be written at its end.

    Raises:
        DumpError: ``path`` has none of the endings, no file can have it, its folder does not exist, or it exists and
            ``force`` is not set.
    """
    ending_of(path, endings, f"output {path}", writing=True)
    try:
        in_folder, exists = path.parent.is_dir(), path.exists()
    except OSError as error:
        raise DumpError(
            f"output {path}",
            got=error.strerror or str(error),
            expected="the name of a file that can be made",
            reason="it is written at the end, when all work is done",
            remedy="name another file",
        ) from None
    if not in_folder:
        raise DumpError(
            f"output {path}",
            got=f"no folder {path.parent}",
            expected="a file name in a folder that exists",
            reason="folders are not made, so that a mistyped path does not go unnoticed",
            remedy="make the folder, or write elsewhere",
        )
    if force or not exists:
        return
    same = is_there(dump) and path.samefile(dump)
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
    from miles_norm.dumps import stream_dump, write_rows
    from miles_norm.storage.appending import append_columns

    if batch.rows_with_added_keys and not force:
        raise _keys_taken(batch, path)
    total = batch.result.index.num_rows
    with kept_warnings() as warnings, bar(f"writing {path.name}") as progress:
        if batch.path.suffix.lower() == path.suffix.lower() == ".parquet":
            append_columns(batch.path, path, _added_columns(batch), progress=progress)
            return warnings
        stream = stream_dump(batch.path)
        write_rows(_with_advantages(batch, stream.rows), stream, path, total=total, progress=progress)
    return warnings


def _added_columns(batch: Batch) -> list[StoredColumn]:
    from miles_norm.storage.table import StoredColumn

    result = batch.result
    rewards = result.rollout_rewards[result.index.row_rollout].cpu()
    scored = rewards == rewards
    values = (result.advantages.double().cpu(), result.trained_rows.cpu(), rewards.masked_fill(~scored, 0.0))
    cells, valid = ("float", "bool", "float"), (None, None, None if bool(scored.all()) else scored)
    parts = zip(ADDED_KEYS, cells, values, valid, strict=True)
    return [StoredColumn(name, cell, column, None, known) for name, cell, column, known in parts]


def _with_advantages(batch: Batch, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    result = batch.result
    rewards = result.rollout_rewards[result.index.row_rollout].tolist()
    columns = zip(result.advantages.tolist(), result.trained_rows.tolist(), rewards, strict=True)
    for number in range(result.index.num_rows):
        row = next(rows, None)
        if row is None:
            raise _changed(batch, f"{number} rows")
        advantage, trained, reward = next(columns)
        yield {
            **row,
            "advantage": advantage,
            "trained": trained,
            "rollout_reward": None if reward != reward else reward,
        }
    if next(rows, None) is not None:
        raise _changed(batch, f"more than {result.index.num_rows} rows")


def _changed(batch: Batch, got: str) -> DumpError:
    return DumpError(
        f"rollout dump {batch.path}",
        got=f"{got} at the second reading",
        expected=f"the {batch.result.index.num_rows} rows of the first one",
        reason="the file was changed meanwhile, so its rows and the advantages no longer fit together",
        remedy="wait until the file is complete, then run the command again",
    )


def _keys_taken(batch: Batch, path: Path) -> DumpError:
    return DumpError(
        f"output {path}",
        got=f"{format_rows(batch.rows_with_added_keys)} with one of the keys",
        expected=f"rows without {', '.join(ADDED_KEYS)}",
        reason="values that the dump recorded under these names would be lost",
        remedy="rename the keys in the dump, or pass --force to replace them",
        rows=batch.rows_with_added_keys,
    )
