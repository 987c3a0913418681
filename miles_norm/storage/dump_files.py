"""Rows of a rollout dump, as dicts, in columns and back: keys and their order, missing keys and None stay apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from miles_norm.storage import typed_json
from miles_norm.storage.cells import NotPlainRowsError, decode_cells, encode_cells
from miles_norm.storage.dtypes import COLUMN_DTYPES
from miles_norm.storage.parquet_file import foreign_rows, load_row_groups, parquet_head, save_parquet
from miles_norm.storage.plain_values import NotPlainError
from miles_norm.storage.safetensors_file import (
    load_safetensors,
    safetensors_from_bytes,
    safetensors_to_bytes,
    save_safetensors,
)
from miles_norm.storage.table import StoredColumn, StoredTable, reading

__all__ = ["load_rows", "rows_from_bytes", "rows_to_bytes", "save_rows", "stream_rows"]

Progress = Callable[[int, int], None]
Dump = tuple[Any, Any, Any]


def save_rows(
    rows: Sequence[dict[str, Any]], rollout_id: int | None, metadata: dict[str, Any], file: BinaryIO, suffix: str
) -> None:
    """Write plain rows as one column per key.

    Args:
        rows: As ``plain_mapping(..., keep_arrays=True)`` returns them.
        rollout_id: Number of the rollout step.
        metadata: Likewise plain.
        file: Opened for binary writing.
        suffix: ``.parquet`` or ``.safetensors``.

    Raises:
        NotPlainRowsError: values of rows that have no form in a file.
        NotPlainError: the same in the metadata.
        MissingDependencyError: without the package pyarrow or safetensors.
    """
    if suffix == ".parquet":
        save_parquet(_to_table(rows, rollout_id, metadata, apart=False), file)
    else:
        save_safetensors(_to_table(rows, rollout_id, metadata, apart=True), file)


def rows_to_bytes(rows: Sequence[dict[str, Any]], metadata: dict[str, Any]) -> bytes:
    """What ``save_rows`` writes into a ``.safetensors`` file; there may be no rows.

    Raises:
        NotPlainRowsError, NotPlainError, MissingDependencyError: as there.
    """
    return safetensors_to_bytes(_to_table(rows, None, metadata, apart=True))


def rows_from_bytes(data: bytes, subject: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and metadata of a ``.safetensors`` file.

    Raises:
        DumpError: bytes that are damaged or of another kind.
        MissingDependencyError: without the package safetensors.
    """
    with reading(subject):
        rows, _, metadata = safetensors_from_bytes(data, "rollout_dump", subject, _rows_of)
        return rows, metadata


def _to_table(
    rows: Sequence[dict[str, Any]], rollout_id: int | None, metadata: dict[str, Any], *, apart: bool
) -> StoredTable:
    """The table of a dump; with ``apart``, tensors inside JSON stand beside the columns."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> int | None:
        if not apart or tensor.dtype not in COLUMN_DTYPES.values():
            return None
        tensors.append(tensor)
        return len(tensors) - 1

    keys = {key: None for row in rows for key in row}
    numbers = {key: number for number, key in enumerate(keys)}
    shapes: dict[tuple[str, ...], int] = {}
    codes = torch.tensor([shapes.setdefault(tuple(row), len(shapes)) for row in rows], dtype=torch.int32)
    columns = [StoredColumn("keys", "tensor", codes)]
    bad: list[NotPlainRowsError] = []
    for key in keys:
        try:
            columns.append(encode_cells(key, [row.get(key) for row in rows], keep))
        except NotPlainRowsError as error:
            bad.append(error)
    if bad:
        raise NotPlainRowsError(str(bad[0]), sorted({row for error in bad for row in error.rows}))
    head = {
        "rollout_id": rollout_id,
        "metadata": metadata,
        "keys": [[numbers[key] for key in shape] for shape in shapes],
    }
    try:
        text = typed_json.dumps(head, keep)
    except (TypeError, RecursionError) as error:
        raise NotPlainError(f"'metadata': {error}") from error
    return StoredTable("rollout_dump", len(rows), columns, text, tensors)


def load_rows(path: Path, suffix: str, subject: str, progress: Progress | None = None) -> Dump:
    """Rows, rollout_id and metadata; of a Parquet file from elsewhere only rows, a dict of all its columns each.

    Args:
        path: Of the file.
        suffix: ``.parquet`` or ``.safetensors``.
        subject: What errors are about.
        progress: Called with (row groups done, row groups in all) while Parquet is read.

    Raises:
        DumpError: a file that is damaged or of another kind.
        MissingDependencyError: without the package pyarrow or safetensors.
    """
    with reading(subject):
        if suffix == ".safetensors":
            found: Dump = load_safetensors(path, "rollout_dump", subject, None, _rows_of)
            return found
        rollout_id, metadata, rows = stream_rows(path, subject, progress)
        return list(rows), rollout_id, metadata


def stream_rows(
    path: Path, subject: str, progress: Progress | None = None
) -> tuple[Any, Any, Iterator[dict[str, Any]]]:
    """rollout_id, metadata, and an iterator over the rows of a Parquet file that holds one row group at a time."""
    with reading(subject):
        text = parquet_head(path, "rollout_dump", subject)
        head = {"rollout_id": None, "metadata": None} if text is None else typed_json.loads(text)
        rollout_id, metadata = head["rollout_id"], head["metadata"]

    def rows() -> Iterator[dict[str, Any]]:
        with reading(subject):
            if text is None:
                yield from foreign_rows(path, progress)
                return
            for table in load_row_groups(path, "rollout_dump", subject, None, progress):
                yield from _group_rows(table, head)

    return rollout_id, metadata, rows()


def _rows_of(table: StoredTable) -> Dump:
    head = typed_json.loads(table.head, table.kept)
    return _group_rows(table, head), head["rollout_id"], head["metadata"]


def _group_rows(table: StoredTable, head: Any) -> list[dict[str, Any]]:
    codes = table.columns[0].values.tolist()
    names = [column.name for column in table.columns[1:]]
    if table.columns[0].cell != "tensor" or len(set(names)) != len(names):
        raise ValueError("columns that are no rows of a dump")
    cells = [decode_cells(column, table.kept) for column in table.columns[1:]]
    shapes = [[(names[number], cells[number]) for number in shape] for shape in head["keys"]]
    return [{name: values[row] for name, values in shapes[code]} for row, code in enumerate(codes)]
