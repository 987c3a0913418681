"""What a ragged column accepts: rows, offsets, row numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows

__all__ = ["bad_column", "checked_offsets", "odd_rows", "offsets_of", "repeated", "row_numbers", "running"]


def row_numbers(rows: Any, num_rows: int) -> Tensor:
    """Row numbers as int64 ``[K]`` on the CPU, from a slice, integers or a bool mask ``[N]``.

    Raises:
        SampleError: numbers that are no row; all of them are named.
    """
    if isinstance(rows, slice):
        return torch.tensor(range(*rows.indices(num_rows)), dtype=torch.int64)
    numbers = rows.cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    if numbers.dtype == bool and numbers.shape == (num_rows,):
        return torch.from_numpy(numbers.nonzero()[0])
    if numbers.size == 0:
        return torch.empty(0, dtype=torch.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise bad_column(
            "selected rows",
            f"shape {list(numbers.shape)}, dtype {numbers.dtype}",
            f"row numbers, or a bool mask of shape [{num_rows}]",
        )
    bad = numbers[(numbers < 0) | (numbers >= num_rows)].tolist()
    if bad:
        raise bad_column("selected rows", format_rows(bad), f"numbers from 0 to {num_rows - 1}", bad)
    return torch.from_numpy(numbers.astype(np.int64))


def odd_rows(rows: Sequence[Any]) -> list[int]:
    """Rows that are no list, tuple, bytes, array or tensor with at least one dimension."""
    kinds = set(map(type, rows))
    # One look per kind of row instead of one per row, wherever that is enough.
    if all(issubclass(kind, list | tuple | bytes | bytearray) for kind in kinds):
        return []
    if kinds == {np.ndarray} and set(map(_NDIM, rows)) == {1}:
        return []
    return [n for n, row in enumerate(rows) if not _is_row(row)]


_NDIM = attrgetter("ndim")


def _is_row(row: Any) -> bool:
    if isinstance(row, Tensor) and (row.is_nested or row.layout != torch.strided):
        return False
    if isinstance(row, np.ndarray | Tensor):
        return row.ndim >= 1 and 0 not in row.shape[1:]
    return isinstance(row, list | tuple | bytes | bytearray)


def offsets_of(lengths: Iterable[int]) -> Tensor:
    """int64 ``[N + 1]`` from N lengths."""
    counts = np.fromiter(lengths, np.int64)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return torch.from_numpy(offsets)


def running(lengths: Tensor) -> Tensor:
    """int64 ``[N + 1]`` from int64 ``[N]``, on the same device."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def repeated(values: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """``[T]`` from ``[N]``: entry n as often as row n is long.

    ``total`` is T; without it the host waits for a device to know it.
    """
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:
        # torch.repeat_interleave takes 30 times as long on a CPU.
        return torch.from_numpy(np.repeat(values.detach().numpy(), lengths.numpy()))
    return torch.repeat_interleave(values, lengths, output_size=total)


def checked_offsets(given: Any, values: Tensor) -> Tensor:
    """Offsets as int64 on the device of the values.

    Raises:
        SampleError: they do not rise from 0 to the number of values.
    """
    offsets = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if offsets.ndim != 1 or len(offsets) < 1 or offsets.dtype.is_floating_point or offsets.dtype == torch.bool:
        raise bad_column(
            "offsets of a ragged column",
            f"shape {list(offsets.shape)}, dtype {offsets.dtype}",
            "whole numbers [N + 1]",
        )
    offsets = offsets.to(device=values.device, dtype=torch.int64)
    bad: list[int] = torch.nonzero(offsets.diff() < 0)[:, 0].tolist()
    if bad or int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
        got = (
            f"an end before the beginning in {format_rows(bad)}" if bad else f"{int(offsets[0])} to {int(offsets[-1])}"
        )
        raise bad_column(
            "offsets of a ragged column", got, f"numbers that rise from 0 to {len(values)}, the number of values", bad
        )
    return offsets


def bad_column(subject: str, got: str, expected: str, rows: Sequence[int] = ()) -> SampleError:
    """The error for a column that cannot be read."""
    return SampleError(
        subject,
        got=got,
        expected=expected,
        reason="a row is the part of the flat values between two offsets",
        remedy="pass one list or array per row, or flat values with matching offsets",
        rows=rows,
    )
