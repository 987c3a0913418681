"""Python values, one per row, to a stored column and back, with their types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.errors import SampleError
from miles_norm.storage import typed_json
from miles_norm.storage.dtypes import COLUMN_DTYPES
from miles_norm.storage.plain_values import NotPlainError
from miles_norm.storage.table import StoredColumn
from miles_norm.train_data.ragged import Ragged
from miles_norm.train_data.ragged_build import from_numpy
from miles_norm.train_data.ragged_checks import offsets_of

__all__ = ["NotPlainRowsError", "decode_cells", "encode_cells"]

_SCALARS = {int: ("int", torch.int64), float: ("float", torch.float64), bool: ("bool", torch.bool)}
_LISTS = {int: ("ints", torch.int64), float: ("floats", torch.float64)}
_STORABLE = frozenset(COLUMN_DTYPES.values())

Keep = Callable[[Tensor], int | None]


class NotPlainRowsError(NotPlainError):
    """Values that cannot be written; ``rows`` names them."""

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


def encode_cells(name: str, values: Sequence[Any], keep: Keep = lambda tensor: None) -> StoredColumn:
    """One value per row as a column: typed where all rows have one type or are None, else as JSON.

    Args:
        name: Of the column.
        values: Plain values, as ``plain_mapping(..., keep_arrays=True)`` returns them.
        keep: Told of each tensor inside JSON; see ``typed_json.dumps``.

    Raises:
        NotPlainRowsError: values that no form can hold; ``rows`` names them.
    """
    present = [value for value in values if value is not None]
    kinds = set(map(type, present))
    column = _typed(name, kinds.pop(), values, present) if len(kinds) == 1 else None
    if column is None:
        column = _json(name, values, keep)
    if len(present) < len(values):
        column.valid = torch.tensor([value is not None for value in values], dtype=torch.bool)
    return column


def decode_cells(column: StoredColumn, kept: Callable[[int], Tensor] | None = None) -> list[Any]:
    """The values that ``encode_cells`` was given.

    Raises:
        ValueError, KeyError, TypeError and others: JSON or text that ``encode_cells`` did not write.
    """
    rows = _DECODERS[column.cell](column, kept)
    if column.valid is not None:
        rows = [row if valid else None for row, valid in zip(rows, column.valid.tolist(), strict=True)]
    return rows


def _typed(name: str, kind: type, values: Sequence[Any], present: list[Any]) -> StoredColumn | None:
    """None where the values have no common type that a column can have."""
    try:
        if kind in _SCALARS:
            cell, dtype = _SCALARS[kind]
            rows = Ragged.from_rows([[kind() if value is None else value for value in values]], dtype)
            return StoredColumn(name, cell, rows.values)
        if kind is str:
            return _text(name, "str", [value.encode() if value is not None else b"" for value in values])
        if kind is list:
            types: set[type] = set()
            for value in present:
                types.update(map(type, value))
            if len(types) == 1 and (only := types.pop()) in _LISTS:
                return _ragged(name, *_LISTS[only], values)
        elif kind in (np.ndarray, Tensor):
            first = present[0]
            if first.ndim and 0 not in first.shape[1:] and len({(v.dtype, v.shape[1:]) for v in present}) == 1:
                like = first if kind is Tensor else from_numpy(first)
                native = kind is Tensor or first.dtype.isnative
                if like.dtype in _STORABLE and native and all(v.ndim for v in present):
                    return _ragged(name, "tensors" if kind is Tensor else "array", like.dtype, values, first[:0])
    except (SampleError, UnicodeEncodeError, TypeError):
        # Integers beyond int64, text with lone surrogates, arrays that torch lacks: all have their JSON.
        pass
    return None


def _ragged(name: str, cell: str, dtype: torch.dtype, values: Sequence[Any], empty: Any = ()) -> StoredColumn:
    rows = Ragged.from_rows([empty if value is None else value for value in values], dtype)
    return StoredColumn(name, cell, rows.values, rows.offsets)


def _text(name: str, cell: str, texts: list[bytes]) -> StoredColumn:
    data = b"".join(texts)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return StoredColumn(name, cell, values, offsets_of(map(len, texts)))


def _json(name: str, values: Sequence[Any], keep: Keep) -> StoredColumn:
    texts: list[bytes] = []
    bad: list[int] = []
    problem = ""
    for row, value in enumerate(values):
        try:
            texts.append(b"" if value is None else typed_json.dumps(value, keep).encode("ascii"))
        except (TypeError, ValueError, RecursionError) as error:
            problem = problem or ("nested too deeply" if isinstance(error, RecursionError) else str(error))
            bad.append(row)
    if bad:
        raise NotPlainRowsError(f"{name!r}: {problem}", bad)
    return _text(name, "json", texts)


def _scalars(column: StoredColumn, kept: Any) -> list[Any]:
    rows: list[Any] = column.values.numpy().tolist()
    return rows


def _texts(column: StoredColumn, kept: Any) -> list[Any]:
    return [str(part, "utf-8") for part in _parts(column, column.values.numpy().tobytes())]


def _jsons(column: StoredColumn, kept: Any) -> list[Any]:
    parts = _parts(column, str(column.values.numpy().tobytes(), "ascii"))
    return [typed_json.loads(part, kept) if part else None for part in parts]


def _parts(column: StoredColumn, data: Any) -> list[Any]:
    assert column.offsets is not None
    return [data[start:stop] for start, stop in pairwise(column.offsets.tolist())]


_DECODERS: dict[str, Callable[[StoredColumn, Any], list[Any]]] = {
    "int": _scalars,
    "float": _scalars,
    "bool": _scalars,
    "str": _texts,
    "json": _jsons,
    "ints": lambda column, kept: [part.tolist() for part in _parts(column, column.values.numpy())],
    "floats": lambda column, kept: [part.tolist() for part in _parts(column, column.values.numpy())],
    "array": lambda column, kept: _parts(column, column.values.numpy()),
    "tensors": lambda column, kept: _parts(column, column.values),
}
