"""Ids of prompt groups, rollouts and adapters, of any hashable kind, as int64 codes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows, shown

__all__ = [
    "IdColumn",
    "PairedIds",
    "RolloutList",
    "check_length",
    "encode_ids",
    "entries_of",
    "is_readable",
    "plain_id",
    "shared_tensor",
    "unreadable",
]

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, eq=False)
class IdColumn:
    """Ids of any hashable kind as int64 codes; equal ids have equal codes.

    ``labels[code]`` is the id where the codes are not the ids themselves. Rows in ``missing`` have no id: their codes
    are unlike all others.
    """

    codes: Tensor
    labels: tuple[Hashable, ...] | None = None
    missing: Tensor | None = None

    def label(self, row: int) -> Hashable:
        """The id of a row as it was given, None if it has none."""
        if self.missing is not None and bool(self.missing[row]):
            return None
        code = int(self.codes[row])
        return code if self.labels is None else self.labels[code]

    def labels_at(self, rows: Tensor) -> list[Hashable]:
        """``label`` of several rows."""
        codes = self.codes[rows].tolist()
        missing = [False] * len(codes) if self.missing is None else self.missing[rows].tolist()
        labels = self.labels
        return [
            None if absent else code if labels is None else labels[code]
            for code, absent in zip(codes, missing, strict=True)
        ]

    def to(self, device: torch.device) -> IdColumn:
        """The same ids on another device."""
        return IdColumn(self.codes.to(device), self.labels, None if self.missing is None else self.missing.to(device))


@dataclass(frozen=True, slots=True)
class RolloutList:
    """Id of a rollout that was a list of its own in the input: the number of that list. It equals no id of a row."""

    number: int

    def __repr__(self) -> str:
        return f"<list {self.number}>"


class PairedIds(IdColumn):
    """Ids that are pairs of two columns; the pairs are put together only where a label is asked for."""

    def __init__(self, first: IdColumn, second: IdColumn) -> None:
        outer = torch.unique(first.codes, return_inverse=True)[1]
        inner = second.codes
        low, high = (int(x) for x in torch.aminmax(inner))
        if (high - low + 1) * len(inner) >= 2**63:
            inner, low = torch.unique(inner, return_inverse=True)[1], 0
            high = int(inner.max())
        super().__init__(outer * (high - low + 1) + (inner - low), None, second.missing)
        object.__setattr__(self, "first", first)
        object.__setattr__(self, "second", second)

    first: IdColumn
    second: IdColumn

    def label(self, row: int) -> Hashable:
        """The pair of ids of a row."""
        return None if self.missing is not None and bool(self.missing[row]) else self.labels_at(torch.tensor([row]))[0]

    def labels_at(self, rows: Tensor) -> list[Hashable]:
        """``label`` of several rows."""
        missing = [False] * len(rows) if self.missing is None else self.missing[rows].tolist()
        pairs = zip(self.first.labels_at(rows), self.second.labels_at(rows), missing, strict=True)
        return [None if absent else (first, second) for first, second, absent in pairs]


def encode_ids(values: Any, name: str, rows: int, device: torch.device | None = None) -> IdColumn:
    """Turn ids of any hashable kind into int64 codes.

    Integers stay as they are; other ids, and integers beyond int64, are numbered by first appearance. None and NaN mean
    that the row has no id; ``3.0`` and a tensor holding 3 are the id 3, as tables and tensors bring them.

    Raises:
        SampleError: another length, or ids that are bools or cannot be hashed; all rows are named.

    >>> encode_ids(["x", None, "x"], "rollout", 3).codes.tolist()
    [0, 2, 0]
    """
    if isinstance(values, np.ndarray) or (isinstance(values, Tensor) and is_readable(values)):
        numeric = _numeric_ids(values, name, rows, device)
        if numeric is not None:
            return numeric
        values = values.tolist()
    entries = entries_of(values)
    if entries is None:
        raise SampleError(
            f"{name} column",
            got=unreadable(values) if isinstance(values, Tensor) else f"a value of type {type(values).__name__}",
            expected=f"{rows} ids: a list, an array or a tensor",
            reason="every column has one entry per row",
            remedy="pass one id per row, in the order of the rows",
        )
    values = entries
    check_length(name, (len(values),), rows)
    kinds = set(map(type, values))
    if kinds == {int} and min(values) in _INT64 and max(values) + rows in _INT64:
        return IdColumn(torch.from_numpy(np.array(values, dtype=np.int64)).to(device or "cpu"))
    ids = values if kinds <= {int, str, NoneType} else _plain_ids(values, name)
    missing = [value is None for value in ids]
    known: list[Any] = [value for value in ids if value is not None]
    labels: tuple[Hashable, ...] | None = None
    if all(isinstance(value, int) for value in known) and (
        not known or (min(known) in _INT64 and max(known) + rows in _INT64)
    ):
        next_code = max(known, default=-1) + 1
        codes = [next_code + row if value is None else value for row, value in enumerate(ids)]
    else:
        numbers_of: dict[Hashable, int] = {}
        codes = [-1 if value is None else numbers_of.setdefault(value, len(numbers_of)) for value in ids]
        labels = tuple(numbers_of)
        codes = [len(labels) + row if code < 0 else code for row, code in enumerate(codes)]
    tensor = torch.from_numpy(np.array(codes, dtype=np.int64)).to(device or "cpu")
    return IdColumn(tensor, labels, torch.tensor(missing, device=device) if any(missing) else None)


def plain_id(value: Any) -> Any:
    """An id as it is compared: a number out of a tensor or table is that number, ``3.0`` is 3, NaN is None.

    >>> plain_id(np.float64(3)), plain_id(torch.tensor(4)), plain_id(math.nan), plain_id("a")
    (3, 4, None, 'a')
    """
    array = isinstance(value, np.ndarray) or (isinstance(value, Tensor) and is_readable(value))
    if isinstance(value, np.generic) or (array and math.prod(value.shape) == 1):
        value = value.item()
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has a number in every place of one shape: it is neither nested, sparse nor quantized, nor on
    ``meta``."""
    plain = not tensor.is_nested and not tensor.is_meta and not tensor.is_quantized
    return plain and tensor.layout == torch.strided


def unreadable(tensor: Tensor) -> str:
    """What a tensor is that is not readable, for a message.

    >>> unreadable(torch.ones(2).to_sparse()), unreadable(torch.ones(2, device="meta"))
    ('a sparse tensor', 'a tensor on meta, which has no values')
    """
    if tensor.is_meta:
        return "a tensor on meta, which has no values"
    return f"a {'nested' if tensor.is_nested else 'quantized' if tensor.is_quantized else 'sparse'} tensor"


def _plain_ids(values: Sequence[Any], name: str) -> list[Hashable | None]:
    ids: list[Hashable | None] = []
    bad: list[int] = []
    for row, given in enumerate(values):
        value = plain_id(given)
        if isinstance(value, bool) or not _hashable(value):
            bad.append(row)
        ids.append(value)
    if bad:
        raise SampleError(
            f"{name} id of {format_rows(bad)}",
            got=", ".join(shown(values[row]) for row in bad[:5]),
            expected="an int, a string, or another hashable id; None where there is none",
            reason="rows belong together when their ids are equal",
            remedy="name groups and rollouts by numbers or strings",
            rows=bad,
        )
    return ids


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    # Tensors and arrays hash or compare by identity, which would make every row its own group.
    parts = value if isinstance(value, tuple | frozenset) else ()
    return not isinstance(value, Tensor | np.ndarray) and all(map(_hashable, parts))


def _numeric_ids(
    values: Tensor | np.ndarray[Any, Any], name: str, rows: int, device: torch.device | None
) -> IdColumn | None:
    """Codes of an integer or float column without leaving the device; None if the dtype is of another kind."""
    check_length(name, tuple(values.shape), rows)
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iuf" or values.dtype == np.uint64:
            return None
        values = shared_tensor(values)
    if device is not None:
        values = values.to(device)
    if values.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        return IdColumn(values.detach().to(torch.int64))
    if not values.is_floating_point():
        return None
    absent = torch.isnan(values)
    whole = values.masked_fill(absent, 0.0)
    if not bool(((whole == whole.trunc()) & (whole.abs() < 2**53)).all()):
        return None
    codes = whole.to(torch.int64)
    if not bool(absent.any()):
        return IdColumn(codes)
    fresh = int(codes.max()) + 1 + torch.arange(rows, device=values.device)
    return IdColumn(torch.where(absent, fresh, codes), None, absent)


def entries_of(values: Any) -> list[Any] | None:
    """The entries of a list, a tuple, or whatever else has a length and an order; None if it has not.

    Those of a one-dimensional tensor or array are Python's numbers, those of one with more dimensions its rows. A text,
    a dict and a generator have none: there would be letters or keys, or nothing left the second time. Nor have nested
    tensors, which have no common shape, sparse and quantized ones, and those on ``meta``, which have no values.

    >>> entries_of((1, 2)), entries_of({1: 2}), entries_of("12"), entries_of(5)
    ([1, 2], None, None, None)
    """
    if isinstance(values, Tensor) and not is_readable(values):
        return None
    if isinstance(values, Tensor | np.ndarray):
        return None if values.ndim == 0 else values.tolist() if values.ndim == 1 else list(values)
    kind = type(values)
    if isinstance(values, Mapping | str | bytes | bytearray) or not hasattr(kind, "__getitem__"):
        return None
    try:
        len(values)
    except TypeError:
        return None
    return list(values)


def shared_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """The array as a tensor, copied only where torch cannot share it: reversed, read-only, of the other byte order."""
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def check_length(name: str, shape: tuple[int, ...], rows: int) -> None:
    """Refuse a column that is not one-dimensional or has another length than the rewards."""
    if shape != (rows,):
        raise SampleError(
            f"{name} column",
            got=f"shape {list(shape)}",
            expected=f"[{rows}], one entry per row",
            reason="a row is the same entry of every column",
            remedy="pass one-dimensional columns of one length",
        )
