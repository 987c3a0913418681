"""Columns as files hold them: a few typed tensors each, and a layout that says what their rows are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from miles_norm.errors import DumpError, MilesNormError, MissingDependencyError, format_rows
from miles_norm.storage.dtypes import COLUMN_DTYPES, DTYPE_NAMES
from miles_norm.train_data.ragged import Ragged

__all__ = [
    "ColumnLayout",
    "Layout",
    "StoredColumn",
    "StoredTable",
    "field_names",
    "read_layout",
    "reading",
    "refuse",
    "refuse_value",
]

VERSION = 1
TEXT_CELLS = ("str", "json")
RAGGED_CELLS = ("ragged", "ints", "floats", "array", "tensors")
CELLS = ("tensor", "int", "float", "bool", *TEXT_CELLS, *RAGGED_CELLS)
_KINDS = {
    "train_data": (
        "train data",
        "train data is what became of a dump: its rows have their advantages and weights already",
        "name the dump that it was converted from; in Python, read_train_data(path) reads it as it is",
    ),
    "rollout_dump": (
        "a rollout dump",
        "the rows of a dump have no advantages and no weights yet",
        "convert it with miles-norm convert DUMP OUT; in Python, read_dump(path) reads it as it is",
    ),
}
"""What the two kinds of files are, why one is not the other, and what to do with it instead."""


@dataclass
class StoredColumn:
    """N rows as tensors.

    ``cell`` says what a row is: ``ragged`` or ``tensor`` for a whole column of train data; else the Python value of one
    row, ``int``, ``float``, ``bool``, ``str``, ``json``, ``ints`` (a list of them), ``floats``, ``array``, ``tensors``.
    """

    name: str
    cell: str
    values: Tensor
    """``[N, ...]``; flat ``[T, ...]`` where there are offsets; UTF-8 bytes for text."""
    offsets: Tensor | None = None
    valid: Tensor | None = None
    """bool ``[N]``: False where the row is None; None if no row is."""

    def rows(self, start: int, stop: int) -> StoredColumn:
        """Some rows, without copying values."""
        valid = None if self.valid is None else self.valid[start:stop]
        if self.offsets is None:
            return StoredColumn(self.name, self.cell, self.values[start:stop], None, valid)
        bounds = self.offsets[start : stop + 1]
        values = self.values[int(bounds[0]) : int(bounds[-1])]
        return StoredColumn(self.name, self.cell, values, bounds - bounds[0], valid)


@dataclass
class StoredTable:
    """Columns of one length, and what belongs to all of them."""

    kind: str
    """``train_data`` or ``rollout_dump``."""
    num_rows: int
    columns: list[StoredColumn]
    head: str
    """JSON of what belongs to all rows."""
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors that JSON cells refer to by number."""
    kept: Callable[[int], Tensor] | None = None
    """Finds such a tensor in a file that is being read."""


@dataclass(frozen=True)
class ColumnLayout:
    """What a file says of one column."""

    name: str
    field: str
    cell: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def ragged(self) -> bool:
        """Whether the column has offsets."""
        return self.cell in RAGGED_CELLS or self.cell in TEXT_CELLS

    def column(self, values: Tensor, offsets: Tensor | None, valid: Tensor | None, num_rows: int) -> StoredColumn:
        """The column, after checking that the parts are what the layout says.

        Raises:
            ValueError: another dtype, shape or number of rows.
            SampleError: offsets that do not fit the values.
        """
        if values.dtype != self.dtype or tuple(values.shape[1:]) != self.shape:
            raise ValueError(f"column {self.name!r:.50} has dtype {values.dtype} and shape {list(values.shape)}")
        count = len(values) if offsets is None else len(Ragged(values, offsets))
        if count != num_rows or (
            valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (num_rows,))
        ):
            raise ValueError(f"column {self.name!r:.50} has another number of rows than {num_rows}")
        return StoredColumn(self.name, self.cell, values, offsets, valid)


@dataclass(frozen=True)
class Layout:
    """What a file says of its columns."""

    kind: str
    num_rows: int
    columns: tuple[ColumnLayout, ...]

    @classmethod
    def of(cls, table: StoredTable) -> Layout:
        """The layout of a table that is to be written."""
        fields = field_names([column.name for column in table.columns])
        return cls(table.kind, table.num_rows, tuple(
            ColumnLayout(column.name, name, column.cell, column.values.dtype, tuple(column.values.shape[1:]))
            for column, name in zip(table.columns, fields, strict=True)
        ))  # fmt: skip

    def text(self) -> str:
        """The layout as JSON."""
        columns = [
            {"name": c.name, "field": c.field, "cell": c.cell, "dtype": DTYPE_NAMES[c.dtype], "shape": list(c.shape)}
            for c in self.columns
        ]
        return json.dumps({"format": self.kind, "version": VERSION, "rows": self.num_rows, "columns": columns})


def read_layout(text: str | bytes, kind: str, subject: str) -> Layout:
    """Parse ``Layout.text``.

    Raises:
        DumpError: a file of another kind or of a later version.
        ValueError, KeyError, TypeError: text that ``Layout.text`` did not write.
    """
    given = json.loads(text)
    found, version, rows = given["format"], given["version"], given["rows"]
    if found in _KINDS and found != kind:
        title, reason, remedy = _KINDS[found]
        raise DumpError(subject, got=title, expected=_KINDS[kind][0], reason=reason, remedy=remedy)
    if found != kind or type(version) is not int or type(rows) is not int or rows < 0:
        raise ValueError(f"the format {found!r:.50}, version {version!r:.50}, with {rows!r:.50} rows")
    if version > VERSION:
        refuse(subject, f"format version {version}; this is version {VERSION}", "install a later miles_norm")
    columns = []
    for one in given["columns"]:
        name, cell, shape = one["name"], one["cell"], one["shape"]
        if not isinstance(name, str) or cell not in CELLS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"the column {name!r:.50} of {cell!r:.50} with shape {shape!r:.50}")
        columns.append(ColumnLayout(name, one["field"], cell, COLUMN_DTYPES[one["dtype"]], tuple(shape)))
    if [one.field for one in columns] != field_names([one.name for one in columns]):
        raise ValueError("names of columns that do not fit their fields")
    return Layout(kind, rows, tuple(columns))


def field_names(names: Sequence[str]) -> list[str]:
    """Names that every format and reader can take: letters, digits, ``_`` and ``-``, each once.

    >>> field_names(["tokens", "a.b", "a b", "ü"])
    ['tokens', 'a_b', 'a_b_2', '_']
    """
    taken: dict[str, int] = {}  # each field, and the last number that was added to it
    for name in names:
        plain = candidate = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name) or "_"
        while candidate in taken:
            taken[plain] += 1
            candidate = f"{plain}_{taken[plain]}"
        taken[candidate] = 1
    return list(taken)


@contextmanager
def reading(subject: str) -> Iterator[None]:
    """Whatever the readers of a damaged file raise comes out as one DumpError."""
    try:
        yield
    except (DumpError, MissingDependencyError):
        raise
    except Exception as error:  # noqa: BLE001  # A damaged file can make the readers of columns and JSON raise anything.
        text = f"{error.subject}: {error.got}" if isinstance(error, MilesNormError) else str(error)
        first_line = (text.splitlines() or [""])[0]
        refuse(subject, f"a file that fails to load with {type(error).__name__}: {first_line:.200}", cause=error)


def refuse(subject: str, got: str, remedy: str | None = None, cause: BaseException | None = None) -> NoReturn:
    """Raise the DumpError for a file that is not what was asked for."""
    raise DumpError(
        subject,
        got=got,
        expected="a whole file, written by this library",
        reason="rows or tokens that are missing or wrong would change what is trained",
        remedy=remedy or "copy the file again if it was cut, or write it again",
    ) from cause


def refuse_value(subject: str, got: str, rows: Sequence[int]) -> NoReturn:
    """Raise the DumpError for a value that no file can hold."""
    raise DumpError(
        subject,
        got=f"{format_rows(rows)}, {got}" if rows else got,
        expected="numbers, strings, booleans, None, tensors, arrays, and lists and dicts of them",
        reason="other values cannot be read back without the code that made them",
        remedy="convert these values to plain ones, or leave the column out",
        rows=rows,
    )
