"""Train data in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from miles_norm.errors import DumpError
from miles_norm.storage import typed_json
from miles_norm.storage.atomic import TRAIN_ENDINGS, ending_of, open_existing, replacing
from miles_norm.storage.cells import NotPlainRowsError, decode_cells, encode_cells
from miles_norm.storage.dtypes import COLUMN_DTYPES
from miles_norm.storage.parquet_file import load_parquet, load_row_groups, pyarrow_package, save_parquet
from miles_norm.storage.plain_values import NotPlainError, plain_mapping
from miles_norm.storage.safetensors_file import load_safetensors, save_safetensors
from miles_norm.storage.table import StoredColumn, StoredTable, reading, refuse_value
from miles_norm.train_data.data import Column, TrainData
from miles_norm.train_data.ragged import Ragged

__all__ = ["iter_train_data", "read_train_data", "write_train_data"]

Progress = Callable[[int, int], None]
_REQUIRED = ("tokens", "response_lengths")
_PART_ROWS = 1 << 10


def write_train_data(data: TrainData, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Write train data; the format follows from the suffix. The file appears whole or not at all.

    Both formats keep the order of columns, dtypes, the bits of numbers (NaN too), ids with their types, None, and
    values of ``metadata`` and ``step`` that JSON lacks, such as tuples, integer keys, arrays and tensors. A column of
    lists is written in its dtype and comes back flat. Dataclasses become dicts, an Enum its value.

    ``.safetensors``: each column is a few flat tensors, to be mapped into memory. ``.parquet``: tokens, masks and
    log-probs are large lists, to be read by any program that reads Parquet; row groups are of bounded size.

    Args:
        data: What to write; on any device.
        path: File ending in ``.safetensors`` or ``.parquet``, in an existing folder.
        progress: Called with (rows done, rows in all).

    Raises:
        DumpError: the folder is missing or not writable, or a value has no form in a file; the message names column
            and rows.
        SampleError: lists that do not fit their dtype.
        MissingDependencyError: without the package safetensors or pyarrow.
    """
    subject = f"train data {os.fspath(path)}"
    suffix = ending_of(path, TRAIN_ENDINGS, subject, writing=True)
    if suffix == ".parquet":
        pyarrow_package()
    table = _to_table(data, subject, pool=suffix == ".safetensors")
    with replacing(Path(path), subject) as file:
        if suffix == ".parquet":
            save_parquet(table, file, progress)
        else:
            save_safetensors(table, file)
    if progress is not None:
        progress(data.num_rows, data.num_rows)


def read_train_data(path: str | os.PathLike[str], *, columns: Collection[str] | None = None) -> TrainData:
    """Read train data; the format follows from the suffix.

    A ``.safetensors`` file is mapped into memory: token data is neither read nor copied before it is used, and writing
    to a tensor changes this process's copy only. The file must not be cut while it is mapped; replacing it is safe.
    A ``.parquet`` file is read column by column, and the checksums of its pages are verified.

    Args:
        path: File ending in ``.safetensors`` or ``.parquet``.
        columns: Columns to load, ``tokens`` and ``response_lengths`` always among them; all by default.

    Raises:
        DumpError: a file that is missing, damaged, of another kind, or without one of the columns.
        MissingDependencyError: without the package safetensors or pyarrow.
    """
    subject = f"train data {os.fspath(path)}"
    suffix = ending_of(path, TRAIN_ENDINGS, subject)
    names = None if columns is None else {*columns, *_REQUIRED}
    open_existing(path, subject).close()
    with reading(subject):
        if suffix == ".parquet":
            data = _from_table(load_parquet(Path(path), "train_data", subject, names))
        else:
            data = load_safetensors(Path(path), "train_data", subject, names, _from_table)
        missing = sorted((names or set()) - data.columns.keys())
        if missing:
            raise DumpError(
                subject,
                got=f"no column {', '.join(missing)}; it has {', '.join(data.columns)}",
                expected="a file with the columns asked for",
                reason="columns are found by their names",
                remedy="ask for columns that the file has",
            )
        return data


def iter_train_data(path: str | os.PathLike[str], *, columns: Collection[str] | None = None) -> Iterator[TrainData]:
    """Read train data in parts of bounded size, in order: a row group of a ``.parquet``, 1024 rows of the other format.

    Each part has the whole ``step``. Arguments and errors are those of ``read_train_data``.
    """
    subject = f"train data {os.fspath(path)}"
    if ending_of(path, TRAIN_ENDINGS, subject) == ".safetensors":
        data = read_train_data(path, columns=columns)
        yield from (data.select(slice(n, n + _PART_ROWS)) for n in range(0, data.num_rows, _PART_ROWS))
        return
    names = None if columns is None else {*columns, *_REQUIRED}
    open_existing(path, subject).close()
    with reading(subject):
        tables = load_row_groups(Path(path), "train_data", subject, names)
    while True:
        with reading(subject):
            table = next(tables, None)
            part = None if table is None else _from_table(table)
        if part is None:
            return
        yield part


def _to_table(data: TrainData, subject: str, *, pool: bool) -> StoredTable:
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> int | None:
        if not pool or tensor.dtype not in COLUMN_DTYPES.values():
            return None
        tensors.append(tensor)
        return len(tensors) - 1

    columns = [_stored(name, value, keep, subject) for name, value in data.columns.items()]
    try:
        head = typed_json.dumps(plain_mapping(data.step, keep_arrays=True), keep)
    except (NotPlainError, TypeError, RecursionError) as error:
        refuse_value(subject, f"step, key {error}", ())
    return StoredTable("train_data", data.num_rows, columns, head, tensors)


def _stored(name: str, value: Column, keep: Callable[[Tensor], int | None], subject: str) -> StoredColumn:
    if isinstance(value, list):
        plain: list[Any] = []
        bad: dict[int, str] = {}
        for row, entry in enumerate(value):
            try:
                plain.append(plain_mapping({name: entry}, keep_arrays=True)[name])
            except NotPlainError as error:
                bad[row] = str(error)
        if not bad:
            try:
                return encode_cells(name, plain, keep)
            except NotPlainRowsError as error:
                bad = dict.fromkeys(error.rows, str(error))
        refuse_value(subject, f"column {next(iter(bad.values()))}", list(bad))
    values = value.values if isinstance(value, Ragged) else value
    if values.dtype not in COLUMN_DTYPES.values():
        refuse_value(subject, f"column {name!r}: dtype {values.dtype}", ())
    if isinstance(value, Ragged):
        return StoredColumn(name, "ragged", values.cpu(), value.offsets.cpu())
    return StoredColumn(name, "tensor", values.detach().cpu())


def _from_table(table: StoredTable) -> TrainData:
    columns: dict[str, Column] = {}
    for column in table.columns:
        if column.cell in ("ragged", "tensor") and column.valid is not None:
            raise ValueError(f"column {column.name!r:.50} has rows that are None")
        if column.cell == "ragged" and column.offsets is not None:
            columns[column.name] = Ragged(column.values, column.offsets)
        elif column.cell == "tensor":
            columns[column.name] = column.values
        else:
            columns[column.name] = decode_cells(column, table.kept)
    step = typed_json.loads(table.head, table.kept)
    if not isinstance(step, dict):
        raise TypeError("a step that is no mapping")
    return TrainData(columns, step)
