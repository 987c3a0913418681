"""Tables as Parquet files, in row groups of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from miles_norm.extras import import_package
from miles_norm.storage.parquet_columns import arrow_column, arrow_type, stored_column
from miles_norm.storage.table import Layout, StoredTable, read_layout, refuse

__all__ = [
    "HEAD",
    "LAYOUT",
    "foreign_fields",
    "foreign_rows",
    "load_parquet",
    "load_row_groups",
    "opened_parquet",
    "parquet_head",
    "parquet_writer",
    "pyarrow_package",
    "read_parquet_layout",
    "save_parquet",
]

LAYOUT, HEAD = b"miles_norm", b"miles_norm.head"
_GROUP_ROWS, _GROUP_VALUES = 1 << 16, 1 << 22

Progress = Callable[[int, int], None]


def save_parquet(table: StoredTable, file: BinaryIO, progress: Progress | None = None) -> None:
    """Write a table, one row group after the other, each of at most 65,536 rows and about 4 million list entries.

    Tokens, masks and log-probs are large lists of one type; what Parquet lacks is JSON text. The layout and the JSON of
    the head are in the metadata of the schema. Pages carry checksums.

    Args:
        table: What to write.
        file: Opened for binary writing.
        progress: Called with (rows done, rows in all) after each row group.

    Raises:
        OSError: the disk is full.
        MissingDependencyError: the package pyarrow is not installed.
    """
    pa, _ = pyarrow_package()
    layout = Layout.of(table)
    schema = pa.schema(
        [pa.field(one.field, arrow_type(pa, one)) for one in layout.columns],
        metadata={LAYOUT: layout.text(), HEAD: table.head},
    )
    # Dictionaries pay for repeated text; token ids and log-probs are as small without.
    text = [one.field for one in layout.columns if one.cell in ("str", "json", "int")]
    with parquet_writer(file, schema, text) as writer:
        for start, stop in _groups(table):
            parts = [column.rows(start, stop) for column in table.columns]
            arrays = [arrow_column(pa, one, part) for one, part in zip(layout.columns, parts, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=stop - start)
            if progress is not None:
                progress(stop, table.num_rows)


def parquet_writer(file: BinaryIO, schema: Any, dictionaries: bool | Sequence[str] = True) -> Any:
    """What writes tables into a file, with a checksum for each page.

    Args:
        file: Opened for binary writing.
        schema: Of the tables.
        dictionaries: Which columns get one.
    """
    return pyarrow_package()[1].ParquetWriter(
        file, schema, compression="zstd", use_dictionary=dictionaries, write_page_checksum=True, write_statistics=False
    )


def load_parquet(path: Path, kind: str, subject: str, names: Collection[str] | None) -> StoredTable:
    """Read all rows, one column after the other.

    Args:
        path: Of the file.
        kind: ``train_data`` or ``rollout_dump``.
        subject: What errors are about.
        names: Columns to read; all by default.
    """
    with opened_parquet(path) as (pa, file):
        layout, head = read_parquet_layout(file, kind, subject)
        columns = []
        for one in layout.columns:
            if names is None or one.name in names:
                # pyarrow 18 fails on a file without row groups.
                table = file.read(columns=[one.field]) if file.num_row_groups else file.schema_arrow.empty_table()
                columns.append(stored_column(pa, one, table.column(one.field), layout.num_rows))
        return StoredTable(kind, layout.num_rows, columns, head)


def load_row_groups(
    path: Path, kind: str, subject: str, names: Collection[str] | None, progress: Progress | None = None
) -> Iterator[StoredTable]:
    """Read one row group at a time; ``progress`` is called with (row groups done, row groups in all)."""
    with opened_parquet(path) as (pa, file):
        layout, head = read_parquet_layout(file, kind, subject)
        wanted = [one for one in layout.columns if names is None or one.name in names]
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=[one.field for one in wanted])
            rows = file.metadata.row_group(number).num_rows
            columns = [stored_column(pa, one, table.column(one.field), rows) for one in wanted]
            yield StoredTable(kind, rows, columns, head)
            if progress is not None:
                progress(number + 1, file.num_row_groups)


def parquet_head(path: Path, kind: str, subject: str) -> str | None:
    """What the file says about all of its rows; None for a Parquet file that this library did not write."""
    with opened_parquet(path) as (_, file):
        if LAYOUT not in (file.schema_arrow.metadata or {}):
            return None
        return read_parquet_layout(file, kind, subject)[1]


def foreign_rows(path: Path, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file that this library did not write, a dict of all its columns each, group by group."""
    with opened_parquet(path) as (_, file):
        for number in range(file.num_row_groups):
            yield from file.read_row_group(number).to_pylist()
            if progress is not None:
                progress(number + 1, file.num_row_groups)


def foreign_fields(
    path: Path, names: Collection[str], progress: Progress | None = None
) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Some columns of a Parquet file that this library did not write, with the number of rows, some rows at a time.

    Lists of numbers come as arrays.
    """
    with opened_parquet(path) as (pa, file):
        present = [name for name in file.schema_arrow.names if name in names]
        done = 0
        for batch in file.iter_batches(batch_size=_GROUP_ROWS, columns=present):
            yield batch.num_rows, {name: _values(pa, batch.column(name)) for name in present}
            done += batch.num_rows
            if progress is not None:
                progress(done, file.metadata.num_rows)


def _values(pa: Any, column: Any) -> list[Any]:
    types = pa.types
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        inner = column.type.value_type
        if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
            rows: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
            return rows
    values: list[Any] = column.to_pylist()
    return values


def pyarrow_package() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    package = import_package(
        "pyarrow",
        "Parquet file",
        reason="it reads and writes this format",
        remedy="pip install 'miles-norm[parquet]', or use another format",
    )
    return package, import_module("pyarrow.parquet")


@contextmanager
def opened_parquet(path: Path) -> Iterator[tuple[Any, Any]]:
    """The module pyarrow, and the file."""
    pa, parquet = pyarrow_package()
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        yield pa, file


def read_parquet_layout(file: Any, kind: str, subject: str) -> tuple[Layout, str]:
    """The layout that the file says it has, and the JSON of its head.

    Raises:
        DumpError: another program wrote the file.
        ValueError: another number of rows than the layout says.
    """
    metadata = file.schema_arrow.metadata or {}
    if LAYOUT not in metadata:
        refuse(subject, "a Parquet file that this library did not write", "write it with write_train_data(data, path)")
    layout = read_layout(metadata[LAYOUT], kind, subject)
    if file.metadata.num_rows != layout.num_rows:
        raise ValueError(f"{file.metadata.num_rows} rows, not {layout.num_rows}")
    return layout, metadata[HEAD].decode("ascii")


def _groups(table: StoredTable) -> Iterator[tuple[int, int]]:
    """Ranges of rows that stay below both bounds; a row that is larger alone is a group of its own."""
    cost = np.zeros(table.num_rows + 1, np.int64)
    for column in table.columns:
        if column.offsets is not None:
            cost += column.offsets.cpu().numpy()
    start = 0
    while start < table.num_rows:
        stop = int(np.searchsorted(cost, cost[start] + _GROUP_VALUES, side="right")) - 1
        stop = min(max(stop, start + 1), start + _GROUP_ROWS, table.num_rows)
        yield start, stop
        start = stop
