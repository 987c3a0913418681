"""A Parquet dump again, with columns added to its rows: group by group, nothing is made into Python objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_norm.storage import typed_json
from miles_norm.storage.atomic import open_existing, replacing
from miles_norm.storage.parquet_columns import arrow_column, arrow_type
from miles_norm.storage.parquet_file import HEAD, LAYOUT, opened_parquet, parquet_writer, read_parquet_layout
from miles_norm.storage.table import ColumnLayout, Layout, StoredColumn, field_names, reading, refuse

__all__ = ["append_columns"]

Progress = Callable[[int, int], None]

_BATCH_ROWS = 1 << 16


def append_columns(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    added: Sequence[StoredColumn],
    *,
    progress: Progress | None = None,
) -> None:
    """Write the rows of a dump with more columns; columns that it has by the same names are replaced.

    A dump that this library wrote stays one, with a key for each column in every row. Any other Parquet file keeps its
    columns and their types.

    Args:
        source: The dump to read.
        path: The dump to write; it appears whole or not at all.
        added: Columns with one number or bool for each row.
        progress: Called with (rows done, rows in all).

    Raises:
        DumpError: a source that is damaged or has another number of rows, or a file that cannot be written.
        MissingDependencyError: the package pyarrow is not installed.
    """
    subject = f"rollout dump {os.fspath(source)}"
    open_existing(source, subject).close()
    with (
        replacing(Path(path), f"rollout dump {os.fspath(path)}") as file,
        reading(subject),
        opened_parquet(Path(source)) as (pa, parquet),
    ):
        rows = len(added[0].values)
        if parquet.metadata.num_rows != rows:
            refuse(subject, f"{parquet.metadata.num_rows} rows, and values for {rows}", "read the file once more")
        own = LAYOUT in (parquet.schema_arrow.metadata or {})
        schema, tables = (_of_our_own if own else _of_any_other)(pa, parquet, subject, added)
        done = 0
        with parquet_writer(file, schema) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(table.num_rows, 1))
                done += table.num_rows
                if progress is not None:
                    progress(done, rows)


def _layouts(added: Sequence[StoredColumn]) -> list[ColumnLayout]:
    return [ColumnLayout(column.name, column.name, column.cell, column.values.dtype, ()) for column in added]


def _of_our_own(pa: Any, parquet: Any, subject: str, added: Sequence[StoredColumn]) -> tuple[Any, Iterator[Any]]:
    """Schema and tables: the layout and the keys of rows in the metadata change along."""
    layout, text = read_parquet_layout(parquet, "rollout_dump", subject)
    new = {one.name: one for one in _layouts(added)}
    keys = list(dict.fromkeys([*(one.name for one in layout.columns[1:]), *new]))
    old = {one.name: one for one in layout.columns[1:]}
    columns = [layout.columns[0], *(new.get(key) or old[key] for key in keys)]
    fields = field_names([one.name for one in columns])
    changed = Layout(
        layout.kind,
        layout.num_rows,
        tuple(replace(one, field=name) for one, name in zip(columns, fields, strict=True)),
    )
    head = typed_json.loads(text)
    numbers = [keys.index(name) for name in new]
    head["keys"] = [list(dict.fromkeys([*shape, *numbers])) for shape in head["keys"]]
    schema = pa.schema(
        [pa.field(one.field, arrow_type(pa, one)) for one in changed.columns],
        metadata={LAYOUT: changed.text(), HEAD: typed_json.dumps(head)},
    )
    values = {column.name: column for column in added}

    def tables() -> Iterator[Any]:
        start = 0
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            stop = start + table.num_rows
            arrays = [
                table.column(before.field)
                if place == 0 or after.name not in values
                else arrow_column(pa, after, values[after.name].rows(start, stop))
                for place, (before, after) in enumerate(zip(columns, changed.columns, strict=True))
            ]
            yield pa.Table.from_arrays(arrays, schema=schema)
            start = stop

    return schema, tables()


def _of_any_other(pa: Any, parquet: Any, subject: str, added: Sequence[StoredColumn]) -> tuple[Any, Iterator[Any]]:
    """Schema and tables: the file's own columns, and the new ones after them or in their place."""
    schema, layouts = parquet.schema_arrow, _layouts(added)
    for one in layouts:
        place = schema.get_field_index(one.name)
        made = pa.field(one.name, arrow_type(pa, one))
        schema = schema.append(made) if place < 0 else schema.set(place, made)
    values = {column.name: (one, column) for one, column in zip(layouts, added, strict=True)}

    def tables() -> Iterator[Any]:
        start = 0
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
            stop = start + batch.num_rows
            arrays = [
                arrow_column(pa, values[name][0], values[name][1].rows(start, stop))
                if name in values
                else batch.column(name)
                for name in schema.names
            ]
            yield pa.Table.from_arrays(arrays, schema=schema)
            start = stop

    return schema, tables()
