"""Read and write rollout dumps: Miles' and slime's ``.pt``, JSON lines, plain or compressed, Parquet and safetensors.

A dump is read without running anything in it, and whatever is wrong with a file comes out as one DumpError.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from miles_norm.errors import DumpError, format_rows
from miles_norm.storage.atomic import DUMP_ENDINGS, ending_of, open_existing, replacing
from miles_norm.storage.json_lines import iter_rows, open_writer
from miles_norm.storage.plain_values import NotPlainError, json_line, plain_mapping
from miles_norm.storage.safe_pickle import load_checkpoint

__all__ = ["DumpStream", "RolloutDump", "read_dump", "stream_dump", "write_dump", "write_rows"]

Progress = Callable[[int, int], None]
_TABLES = (".parquet", ".safetensors")
_logger = logging.getLogger("miles_norm")


@dataclass
class RolloutDump:
    """The rows of one rollout step, as a file holds them."""

    samples: list[dict[str, Any]]
    """One dict per row; keys that Sample does not know are kept."""
    rollout_id: int | None = None
    """Number of the rollout step; None where the file has none."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the trainer recorded beside the rows, such as ``prompt_group_sizes``."""


def read_dump(path: str | os.PathLike[str], *, progress: Progress | None = None) -> RolloutDump:
    """Read a rollout dump; the format follows from the suffix.

    Source: ``.pt`` is the ``torch.save`` zip of ``{"rollout_id", "metadata", "samples"}`` that Miles and slime write;
    the first two may be missing. ``.jsonl`` has one row per line; blank lines are skipped, NaN and Infinity are
    read as Python's json does. ``.jsonl.gz`` and ``.jsonl.zst`` are the same, compressed. ``.parquet`` and
    ``.safetensors`` have one column per key; a Parquet file from elsewhere is read as one dict of its columns per row.

    Args:
        path: File ending in ``.pt``, ``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst``, ``.parquet`` or ``.safetensors``.
        progress: Called with (bytes done, bytes in all) while JSON lines and Parquet are read; other files are read in
            one step.

    Raises:
        UnsafeDumpError: A ``.pt`` that names classes or functions outside the allow-list. Nothing of it is run.
        DumpError: A file that is missing, damaged, of another kind, or without rows.
        MissingDependencyError: ``.jsonl.zst`` without the package zstandard, ``.parquet`` without pyarrow,
            ``.safetensors`` without safetensors.
    """
    subject = f"rollout dump {os.fspath(path)}"
    suffix = ending_of(path, DUMP_ENDINGS, subject)
    with open_existing(path, subject) as file:
        size = os.fstat(file.fileno()).st_size
        if progress is not None:
            progress(0, size)
        if suffix == ".pt":
            dump = _dump_from_object(load_checkpoint(file, subject), subject)
        elif suffix in _TABLES:
            dump = _dump_from_table(Path(path), suffix, subject, progress)
        else:
            dump = RolloutDump(list(iter_rows(file, suffix, subject, progress)))
        if progress is not None:
            progress(size, size)
    _check_rows(dump.samples, subject)
    return dump


@dataclass(frozen=True)
class DumpStream:
    """A dump whose rows are read while they are taken, once, so that memory holds few of them at a time."""

    rows: Iterator[dict[str, Any]]
    rollout_id: int | None
    metadata: dict[str, Any]


def stream_dump(path: str | os.PathLike[str], *, progress: Progress | None = None) -> DumpStream:
    """``read_dump`` row by row. JSON lines and Parquet are streamed; ``.pt`` and ``.safetensors`` are read at once.

    Raises:
        DumpError, MissingDependencyError: as ``read_dump``, here or while the rows are taken.
    """
    subject = f"rollout dump {os.fspath(path)}"
    suffix = ending_of(path, DUMP_ENDINGS, subject)
    if suffix.startswith(".jsonl"):
        open_existing(path, subject).close()
        return DumpStream(_counted(_stream_lines(path, suffix, subject, progress), subject), None, {})
    if suffix != ".parquet":
        dump = read_dump(path, progress=progress)
        return DumpStream(iter(dump.samples), dump.rollout_id, dump.metadata)
    from miles_norm.storage.dump_files import stream_rows

    open_existing(path, subject).close()
    rollout_id, metadata, rows = stream_rows(Path(path), subject, _in_bytes(Path(path), progress))
    _check_head(rollout_id, {} if metadata is None else metadata, subject)
    return DumpStream(_counted(rows, subject), rollout_id, metadata or {})


def _stream_lines(
    path: str | os.PathLike[str], suffix: str, subject: str, progress: Progress | None
) -> Iterator[dict[str, Any]]:
    with open_existing(path, subject) as file:
        yield from iter_rows(file, suffix, subject, progress)


def _counted(rows: Iterator[dict[str, Any]], subject: str) -> Iterator[dict[str, Any]]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        _check_rows([], subject)


def write_dump(dump: RolloutDump, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Write a rollout dump; the format follows from the suffix. The file appears whole or not at all.

    ``.pt`` keeps everything, tensors and arrays included. Dataclasses such as AdapterRef and RewardSpec become plain
    dicts and an Enum its value, so that reading the file needs no class of this library.

    ``.jsonl`` keeps the rows only: it has no place for ``rollout_id`` and ``metadata``; a warning on the logger
    ``miles_norm`` names the metadata keys that are left out. Tensors and arrays become lists, NaN is written as
    ``NaN``.

    ``.parquet`` and ``.safetensors`` keep everything, one column per key: token lists as lists of int64, log-probs as
    lists of float64, ids with their types, mixed values as JSON.

    Args:
        dump: What to write; it must have rows.
        path: File with one of the suffixes that ``read_dump`` takes, in an existing folder.
        progress: Called with (rows done, rows in all).

    Raises:
        DumpError: The folder is missing or not writable, there are no rows, or a value cannot be written in this
            format; the message names rows and keys.
        MissingDependencyError: as for ``read_dump``.
    """
    subject = f"rollout dump {os.fspath(path)}"
    suffix = ending_of(path, DUMP_ENDINGS, subject, writing=True)
    _check_head(dump.rollout_id, dump.metadata, subject)
    _check_rows(dump.samples, subject)
    if suffix.startswith(".jsonl") and dump.metadata:
        _logger.warning("%s: %s has no place for metadata; not written: %s", subject, suffix, _some(dump.metadata))
    with replacing(Path(path), subject) as file:
        if suffix == ".pt":
            _save(dump, file, subject, progress)
        elif suffix in _TABLES:
            _save_table(dump, file, subject, progress, suffix)
        else:
            with open_writer(file, suffix) as stream:
                for line in _plain_rows(dump.samples, len(dump.samples), subject, progress, suffix):
                    stream.write(line)


def _save(dump: RolloutDump, file: BinaryIO, subject: str, progress: Progress | None) -> None:
    import torch

    metadata = _plain_metadata(dump, subject)
    rows = list(_plain_rows(dump.samples, len(dump.samples), subject, progress, ".pt"))
    try:
        torch.save({"rollout_id": dump.rollout_id, "metadata": metadata, "samples": rows}, file)
    except RuntimeError as error:  # torch's zip writer reports a full disk so
        raise OSError(f"torch.save failed: {error}") from error


def _save_table(dump: RolloutDump, file: BinaryIO, subject: str, progress: Progress | None, suffix: str) -> None:
    from miles_norm.storage.dump_files import save_rows

    metadata = _plain_metadata(dump, subject)
    rows = list(_plain_rows(dump.samples, len(dump.samples), subject, progress, suffix))
    try:
        save_rows(rows, dump.rollout_id, metadata, file, suffix)
    except NotPlainError as error:
        bad = list(getattr(error, "rows", ()))
        _refuse_value(subject, f"{f'{format_rows(bad)}, ' if bad else ''}key {error}", bad)


def _dump_from_table(path: Path, suffix: str, subject: str, progress: Progress | None) -> RolloutDump:
    from miles_norm.storage.dump_files import load_rows

    rows, rollout_id, metadata = load_rows(path, suffix, subject, _in_bytes(path, progress))
    return _dump_from_object({"samples": rows, "rollout_id": rollout_id, "metadata": metadata}, subject)


def _in_bytes(path: Path, progress: Progress | None) -> Progress | None:
    """Report the parts of a file in bytes, as for JSON lines."""
    if progress is None:
        return None
    size = path.stat().st_size
    return lambda done, total: progress(size * done // total, size)


def write_rows(
    rows: Iterable[dict[str, Any]],
    like: DumpStream,
    path: str | os.PathLike[str],
    *,
    total: int,
    progress: Progress | None = None,
) -> None:
    """``write_dump`` for rows that come one by one, ``total`` of them; JSON lines are written as they come.

    Args:
        rows: The rows.
        like: Where ``rollout_id`` and ``metadata`` are taken from.
        path: As for ``write_dump``.
        total: Number of rows, for ``progress``.
        progress: Called with (rows done, rows in all).

    Raises:
        DumpError, MissingDependencyError: as ``write_dump``.
    """
    subject = f"rollout dump {os.fspath(path)}"
    suffix = ending_of(path, DUMP_ENDINGS, subject, writing=True)
    if not suffix.startswith(".jsonl"):
        write_dump(RolloutDump(list(rows), like.rollout_id, like.metadata), path, progress=progress)
        return
    if like.metadata:
        _logger.warning("%s: %s has no place for metadata; not written: %s", subject, suffix, _some(like.metadata))
    with replacing(Path(path), subject) as file, open_writer(file, suffix) as stream:
        for line in _plain_rows(rows, total, subject, progress, suffix):
            stream.write(line)


def _dump_from_object(loaded: Any, subject: str) -> RolloutDump:
    if not isinstance(loaded, dict) or "samples" not in loaded:
        got = f"a dict with the keys {_some(loaded)}" if isinstance(loaded, dict) else f"a {type(loaded).__name__}"
        _refuse_head(subject, got)
    rollout_id, metadata = loaded.get("rollout_id"), loaded.get("metadata")
    _check_head(rollout_id, {} if metadata is None else metadata, subject)
    unread = [key for key in loaded if key not in ("rollout_id", "metadata", "samples")]
    if unread:
        _logger.warning("%s: the keys %s are not read", subject, _some(unread))
    return RolloutDump(loaded["samples"], rollout_id, metadata or {})


def _check_head(rollout_id: Any, metadata: Any, subject: str) -> None:
    if not (rollout_id is None or type(rollout_id) is int):
        _refuse_head(subject, f"a rollout_id of type {type(rollout_id).__name__}")
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        _refuse_head(subject, f"metadata of type {type(metadata).__name__}, or with keys that are no strings")


def _refuse_head(subject: str, got: str) -> NoReturn:
    raise DumpError(
        subject,
        got=got,
        expected='a dict with "samples" (list of dicts), "rollout_id" (integer or None) and "metadata" (dict or None)',
        reason="rows, step and group sizes are found by these keys; the last two may be missing",
        remedy="save the dump as Miles and slime do, or write the rows as .jsonl",
    )


def _some(keys: Any) -> str:
    shown = [repr(key)[:50] for key in list(keys)[:10]]
    return ", ".join(shown) + (", ..." if len(keys) > 10 else "")


def _check_rows(samples: Any, subject: str) -> None:
    def is_row(row: Any) -> bool:
        return isinstance(row, dict) and all(isinstance(key, str) for key in row)

    bad = [n for n, row in enumerate(samples) if not is_row(row)] if isinstance(samples, list) else []
    if isinstance(samples, list) and samples and not bad:
        return
    if not isinstance(samples, list):
        got = f"samples of type {type(samples).__name__}"
    elif bad:
        got = f"{format_rows(bad)}; {format_rows(bad[:1])} is of type {type(samples[bad[0]]).__name__}"
    else:
        got = "a dump without rows"
    raise DumpError(
        subject,
        got=got,
        expected="samples: a list with one dict per row, from field names to values, and at least one row",
        reason="the fields of a row are found by name, and without rows there is nothing to normalize",
        remedy="write each row as Sample.to_dict() returns it",
        rows=bad,
    )


def _plain_rows(
    rows: Iterable[dict[str, Any]], total: int, subject: str, progress: Progress | None, suffix: str
) -> Iterator[Any]:
    """Yield each row ready to be written; rows that cannot be are named together at the end."""
    bad: list[int] = []
    problem = ""
    for number, row in enumerate(rows):
        try:
            plain = plain_mapping(row, keep_arrays=not suffix.startswith(".jsonl"))
            yield json_line(plain) if suffix.startswith(".jsonl") else plain
        except NotPlainError as error:
            problem = problem or str(error)
            bad.append(number)
        if progress is not None:
            progress(number + 1, total)
    if bad:
        also = f"; also {format_rows(bad[1:])}" if bad[1:] else ""
        _refuse_value(subject, f"{format_rows(bad[:1])}, key {problem}{also}", bad)


def _plain_metadata(dump: RolloutDump, subject: str) -> dict[str, Any]:
    try:
        return plain_mapping(dump.metadata, keep_arrays=True)
    except NotPlainError as error:
        _refuse_value(subject, f"metadata, key {error}", [])


def _refuse_value(subject: str, got: str, rows: list[int]) -> NoReturn:
    raise DumpError(
        subject,
        got=got,
        expected="numbers, strings, booleans, None, tensors, arrays, lists and dicts of them; bytes, but not in .jsonl",
        reason="other values cannot be read back without the code that made them",
        remedy="convert these values to plain ones, or leave the key out",
        rows=rows,
    )
