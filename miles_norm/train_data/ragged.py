"""Rows of different lengths in one column: flat values with offsets, or the lists they came as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.errors import format_rows
from miles_norm.train_data.ragged_build import adjacent_rows, flat_values, host_array, joined_rows, list_dtype
from miles_norm.train_data.ragged_checks import (
    bad_column,
    checked_offsets,
    odd_rows,
    offsets_of,
    repeated,
    row_numbers,
    running,
)

__all__ = ["Ragged"]

# Rows at least this long are copied one by one; shorter ones by an index of their tokens.
_LONG_ROW = 16


class Ragged:
    """N rows of different lengths.

    Row n is ``values[offsets[n]:offsets[n + 1]]``. There are two backings with one interface. ``Ragged(values,
    offsets)`` holds the flat tensor. ``Ragged.from_rows`` keeps lists, arrays or tensors as they are; ``values`` is
    built from them once, when it is first asked for.

    Args:
        values: ``[T, ...]``, tensor or array of any dtype that torch has; not copied.
        offsets: ``[N + 1]`` integers that rise from 0 to T.

    Raises:
        SampleError: offsets that do not fit the values; all rows are named.

    >>> column = Ragged(torch.tensor([5, 6, 7]), [0, 2, 2, 3])
    >>> len(column), column.lengths.tolist(), column.tolists()
    (3, [2, 0, 1], [[5, 6], [], [7]])
    >>> Ragged.from_rows([[1, 2], [3]], torch.int64).values
    tensor([1, 2, 3])
    """

    __slots__ = ("_bounds", "_dtype", "_offsets", "_rows", "_values")

    def __init__(self, values: Tensor | np.ndarray[Any, Any], offsets: Tensor | np.ndarray[Any, Any] | Sequence[int]):
        flat = values.detach() if isinstance(values, Tensor) else adjacent_rows([values])
        if flat is None or flat.ndim < 1 or 0 in flat.shape[1:]:
            raise bad_column(
                "values of a ragged column",
                f"{'shape ' + str(list(np.shape(values))) if flat is not None else type(values).__name__}",
                "a tensor or array [T, ...] of numbers, with no trailing dimension of size 0",
            )
        self._offsets: Tensor | None = checked_offsets(offsets, flat)
        self._values: Tensor | None = flat
        self._rows: list[Any] | None = None
        self._dtype: torch.dtype = flat.dtype
        self._bounds: list[int] | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: torch.dtype) -> Ragged:
        """Keep N rows as they are; nothing is copied.

        Arrays (or tensors) that lie one after the other in one flat array are recognized, and become views of it.

        Args:
            rows: One list, tuple, bytes, array or tensor per row.
            dtype: What lists become. Arrays and tensors keep their own dtype if it is the same in all rows.

        Raises:
            SampleError: rows of another kind; all of them are named. Elements are looked at when ``values`` is built.
        """
        rows = list(rows)
        bad = odd_rows(rows)
        if bad:
            raise bad_column(
                f"{format_rows(bad)} of a ragged column",
                ", ".join(sorted({type(rows[n]).__name__ for n in bad})),
                "a list, tuple, bytes, array or tensor of numbers per row",
                bad,
            )
        flat = adjacent_rows(rows)
        if flat is not None:
            return _unchecked(flat, offsets_of(map(len, rows)))
        column = _unchecked(None, None, rows)
        column._dtype = list_dtype(rows, dtype)
        return column

    @classmethod
    def from_padded(cls, tensor: Tensor, mask_or_lengths: Tensor) -> Ragged:
        """Take the entries of a padded ``[N, T, ...]`` that a mask ``[N, T]`` marks, or the first ``[N]`` lengths.

        Raises:
            SampleError: shapes that do not fit, or lengths outside 0 to T; all rows are named.

        >>> Ragged.from_padded(torch.tensor([[0, 1, 2], [3, 0, 0]]), torch.tensor([[0, 1, 1], [1, 0, 0]])).tolists()
        [[1, 2], [3]]
        """
        given, shape = mask_or_lengths, tuple(tensor.shape)
        if tensor.ndim < 2 or tuple(given.shape) not in (shape[:1], shape[:2]):
            raise bad_column(
                "padded tensor",
                f"shape {list(shape)} with a mask or lengths of shape {list(given.shape)}",
                "[N, T, ...] with a mask [N, T] or lengths [N]",
            )
        if given.ndim == 1:
            bad = torch.nonzero((given < 0) | (given > shape[1]))[:, 0].tolist()
            if bad:
                raise bad_column(
                    f"length of {format_rows(bad)}",
                    ", ".join(str(given[n].item()) for n in bad[:5]),
                    f"0 to {shape[1]}, the width of the tensor",
                    bad,
                )
            given = torch.arange(shape[1], device=tensor.device) < given.to(tensor.device)[:, None]
        mask = given.to(device=tensor.device, dtype=torch.bool)
        return cls(tensor[mask], offsets_of(mask.sum(dim=1).tolist()))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one part after the other. Parts that are lists give lists.

        Raises:
            SampleError: no parts, or parts with different dtypes or trailing dimensions.
        """
        filled = [part for part in parts if int(part.offsets[-1])] or list(parts[:1])
        kinds = {(part.dtype, part.row_shape) for part in filled}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{str(dtype)[6:]} rows of shape {list(shape)}" for dtype, shape in kinds))
            raise bad_column("parts of a ragged column", found or "no parts", "parts of one dtype and shape")
        rows = [part._rows for part in parts]
        if all(part is not None for part in rows):
            column = _unchecked(None, None, [row for part in rows for row in part or ()])
            column._dtype = filled[0].dtype
            return column
        return _unchecked(torch.cat([p.values for p in filled]), running(torch.cat([p.lengths for p in parts])))

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return len(self.offsets) - 1

    @property
    def values(self) -> Tensor:
        """``[T, ...]``: the rows, one after the other; built once where the rows are lists.

        Raises:
            SampleError: lists with elements that the dtype cannot hold, or rows of different shapes; all are named.
        """
        if self._values is None:
            self._values = flat_values(self._rows or [], self._dtype)
        return self._values

    @property
    def offsets(self) -> Tensor:
        """int64 ``[N + 1]``: where each row begins, and the end."""
        if self._offsets is None:
            self._offsets = offsets_of(map(len, self._rows or []))
        return self._offsets

    @property
    def lengths(self) -> Tensor:
        """int64 ``[N]``."""
        return self.offsets.diff()

    @property
    def dtype(self) -> torch.dtype:
        """dtype of ``values``."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where ``values`` is, or will be built."""
        return torch.device("cpu") if self._values is None else self._values.device

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one entry of a row: ``()``, or the trailing dimensions."""
        if self._values is not None:
            return tuple(self._values.shape[1:])
        first = next((row for row in self._rows or [] if len(row)), ())
        return tuple(np.shape(first[:1]))[1:]

    @property
    def is_flat(self) -> bool:
        """Whether the column is backed by one flat tensor, and not by the rows it came as."""
        return self._rows is None

    def row(self, n: int) -> Any:
        """Row n: a view of the flat tensor, or the very list, array or tensor that came in.

        Raises:
            IndexError: no such row.
        """
        if not -len(self) <= n < len(self):
            raise IndexError(f"row {n} of a ragged column with {len(self)} rows")
        if self._rows is not None:
            return self._rows[n]
        n %= len(self)
        return self.values[self._host_offsets()[n] : self._host_offsets()[n + 1]]

    __getitem__ = row

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows) if self._rows is not None else (self.row(n) for n in range(len(self)))

    def tolists(self) -> list[Any]:
        """One list of Python numbers per row; rows that are lists already are handed out, not copied."""
        if self._rows is not None:
            return [
                row if type(row) is list else list(row) if isinstance(row, tuple | bytes | bytearray) else row.tolist()
                for row in self._rows
            ]
        return [row.tolist() for row in self._host_views()]

    def arrays(self) -> list[Any]:
        """One numpy array per row: views of the flat tensor; rows that are arrays are handed out as they are.

        Dtypes that numpy lacks, such as bfloat16, come as float32.
        """
        if self._rows is not None and all(isinstance(row, np.ndarray) for row in self._rows):
            return list(self._rows)
        return self._host_views()

    def select(self, rows: Any) -> Ragged:
        """Some rows, in any order, repeated or not: a slice, row numbers, or a bool mask ``[N]``.

        A slice of a flat column is a view; other selections copy the rows chosen. Lists stay lists.

        Raises:
            SampleError: row numbers that do not exist; all of them are named.

        >>> Ragged.from_rows([[1], [2, 3], []], torch.int64).select([1, 2, 1]).tolists()
        [[2, 3], [], [2, 3]]
        """
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
        chosen = row_numbers(rows, len(self))
        if self._rows is not None:
            column = _unchecked(None, None, [self._rows[n] for n in chosen.tolist()])
            column._dtype = self._dtype
            return column
        chosen = chosen.to(self.offsets.device)
        lengths, starts = self.lengths[chosen], self.offsets[chosen]
        offsets = running(lengths)
        if self.values.device.type == "cpu" and len(chosen) and int(offsets[-1]) >= _LONG_ROW * len(chosen):
            return _unchecked(joined_rows(self.values, self._host_offsets(), chosen.tolist()), offsets)
        shift = repeated(starts - offsets[:-1], lengths)
        return _unchecked(self.values[shift + torch.arange(len(shift), device=shift.device)], offsets)

    def to(self, device: torch.device | str) -> Ragged:
        """The same rows on another device; self if they are there already."""
        if self.device == torch.device(device):
            return self
        return _unchecked(self.values.to(device), self.offsets.to(device))

    def padded(self, length: int | None = None, fill: Any = 0) -> Tensor:
        """``[N, T, ...]``: each row from position 0 on, ``fill`` after its end.

        Args:
            length: T; the longest row by default.
            fill: What stands where no row is.

        Raises:
            SampleError: rows longer than ``length``; all of them are named.

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).padded(fill=-1).tolist()
        [[1, 2], [3, -1]]
        """
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if longest > width:
            bad = torch.nonzero(self.lengths > width)[:, 0].tolist()
            raise bad_column(
                f"length of {format_rows(bad)}", f"up to {longest}", f"at most {width}, the width asked for", bad
            )
        values = self.values
        out = values.new_full((len(self), width, *values.shape[1:]), fill)
        inside = torch.arange(width, device=values.device) < self.lengths[:, None]
        return out.masked_scatter_(inside.reshape(*inside.shape, *[1] * (values.ndim - 1)), values)

    def __repr__(self) -> str:
        backing = "flat" if self.is_flat else "lists"
        return f"Ragged({len(self)} rows, {int(self.offsets[-1])} entries, {str(self.dtype)[6:]}, {backing})"

    def _range(self, start: int, stop: int) -> Ragged:
        if self._rows is not None:
            column = _unchecked(None, None, self._rows[start:stop])
            column._dtype = self._dtype
            return column
        bounds, offsets = self._host_offsets(), self.offsets[start : stop + 1]
        return _unchecked(self.values[bounds[start] : bounds[stop]], offsets - bounds[start])

    def _host_offsets(self) -> list[int]:
        if self._bounds is None:
            self._bounds = self.offsets.tolist()
        return self._bounds

    def _host_views(self) -> list[Any]:
        array, bounds = host_array(self.values), self._host_offsets()
        return [array[start:stop] for start, stop in pairwise(bounds)]


def _unchecked(values: Tensor | None, offsets: Tensor | None, rows: list[Any] | None = None) -> Ragged:
    column = object.__new__(Ragged)
    column._values, column._offsets, column._rows, column._bounds = values, offsets, rows, None
    column._dtype = torch.int64 if values is None else values.dtype
    return column
