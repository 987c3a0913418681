"""A few fields of the rows of a columnar dump, part after part: token data is never made into Python objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from miles_norm.storage import typed_json
from miles_norm.storage.atomic import DUMP_ENDINGS, ending_of, open_existing
from miles_norm.storage.cells import decode_cells
from miles_norm.storage.parquet_file import foreign_fields, load_row_groups, parquet_head
from miles_norm.storage.safetensors_file import kept_tensor, load_safetensors
from miles_norm.storage.table import StoredColumn, StoredTable, reading, refuse

__all__ = ["FieldStream", "FieldTable", "stream_fields"]

Progress = Callable[[int, int], None]

_PART_ROWS = 1 << 16


@dataclass(frozen=True)
class FieldTable:
    """Fields of some rows."""

    num_rows: int
    fields: dict[str, list[Any]]
    """Values of each field that a row has; None where a row lacks it. Lists of numbers are arrays."""


@dataclass(frozen=True)
class FieldStream:
    """Fields of the rows of a columnar dump, which are read while the tables are taken, once."""

    tables: Iterator[FieldTable]
    rollout_id: int | None
    metadata: dict[str, Any]


def stream_fields(
    path: str | os.PathLike[str], names: Collection[str], *, progress: Progress | None = None
) -> FieldStream | None:
    """Fields of these names of a ``.parquet`` or ``.safetensors`` dump, in tables of at most 65,536 rows or so.

    Whatever else the rows hold is not read, tokens above all. None for a dump of another format.

    Args:
        path: Of the file.
        names: Of the fields.
        progress: Called with (done, in all).

    Raises:
        DumpError: a file that is missing, damaged, of another kind or without rows, here or while tables are taken.
        MissingDependencyError: without the package pyarrow or safetensors.
    """
    subject = f"rollout dump {os.fspath(path)}"
    suffix = ending_of(path, DUMP_ENDINGS, subject)
    if suffix not in (".parquet", ".safetensors"):
        return None
    open_existing(path, subject).close()
    with reading(subject):
        text, kept, tables = _tables(Path(path), suffix, subject, names, progress)
        head = {"rollout_id": None, "metadata": {}} if text is None else typed_json.loads(text, kept)
        rollout_id, metadata = head["rollout_id"], head["metadata"] or {}
        if not (rollout_id is None or type(rollout_id) is int) or not isinstance(metadata, dict):
            raise ValueError(f"a rollout_id {rollout_id!r:.50} and metadata of type {type(metadata).__name__}")
    return FieldStream(_guarded(tables, subject), rollout_id, metadata)


Kept = Callable[[int], Tensor]


def _tables(
    path: Path, suffix: str, subject: str, names: Collection[str], progress: Progress | None
) -> tuple[str | None, Kept | None, Iterator[FieldTable]]:
    """JSON of the head and what finds its tensors, None where there is none; and the fields, part after part."""
    if suffix == ".safetensors":
        table: StoredTable = load_safetensors(path, "rollout_dump", subject, {*names, "keys"}, lambda table: table)
        table.kept = lambda number: kept_tensor(path, number)
        return table.head, table.kept, map(_fields, _parts(table, progress))
    text = parquet_head(path, "rollout_dump", subject)
    if text is None:
        return None, None, (FieldTable(rows, fields) for rows, fields in foreign_fields(path, names, progress))
    return text, None, map(_fields, load_row_groups(path, "rollout_dump", subject, {*names, "keys"}, progress))


def _parts(table: StoredTable, progress: Progress | None) -> Iterator[StoredTable]:
    for start in range(0, table.num_rows, _PART_ROWS):
        stop = min(start + _PART_ROWS, table.num_rows)
        columns = [column.rows(start, stop) for column in table.columns]
        yield StoredTable(table.kind, stop - start, columns, table.head, kept=table.kept)
        if progress is not None:
            progress(stop, table.num_rows)


def _guarded(tables: Iterator[FieldTable], subject: str) -> Iterator[FieldTable]:
    rows = 0
    while True:
        with reading(subject):
            table = next(tables, None)
        if table is None:
            break
        rows += table.num_rows
        if table.num_rows:
            yield table
    if not rows:
        refuse(subject, "a dump without rows", "write a dump with at least one row")


def _fields(table: StoredTable) -> FieldTable:
    # The first column says which keys a row has; a key that it lacks is read as None.
    return FieldTable(table.num_rows, {c.name: decode_cells(_as_arrays(c), table.kept) for c in table.columns[1:]})


def _as_arrays(column: StoredColumn) -> StoredColumn:
    return replace(column, cell="array") if column.cell in ("ints", "floats") else column
