"""Count the ones of a loss mask of any kind, without turning lists into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["count_each_mask", "count_mask", "count_masks", "counted"]

_SHORT = 1024
"""Below this length two calls of ``list.count`` are faster than a buffer."""

_NDIM, _DTYPE = attrgetter("ndim"), attrgetter("dtype")

_ROWS_AT_A_TIME, _ENTRIES_AT_A_TIME = 32, 2**16
"""Masks that are checked in one call, at least; of these a copy is made. Short ones as many as have this many
entries."""


class _Counted(int):
    """The number of ones of a mask that is not kept, and its length."""

    length: int

    def __len__(self) -> int:
        return self.length


def counted(mask: Any) -> Any:
    """A stand-in for a mask that only remembers its ones; None and what is no mask are given back as they are.

    >>> count_mask(counted([1, 0, 1]))
    2
    """
    if mask is None:
        return None
    try:
        stand_in = _Counted(count_mask(mask))
        stand_in.length = len(mask)
        return stand_in
    except (TypeError, ValueError):
        return mask  # counted again, and refused with its row, when the batch is complete


def count_mask(mask: Any) -> int:
    """Number of ones in a loss mask: a list, tuple, bytes, array or tensor of 0 and 1.

    Raises:
        TypeError, ValueError: not one-dimensional, of another type, or entries other than 0 and 1; the message goes on
            after "loss_mask".

    >>> count_mask([1, 0, True]), count_mask(np.array([1.0, 0.0]))
    (2, 1)
    """
    if isinstance(mask, _Counted):
        return int(mask)
    if isinstance(mask, list | tuple):
        if len(mask) >= _SHORT:
            try:
                return _count_array(np.frombuffer(bytearray(mask), dtype=np.uint8))
            except (TypeError, ValueError):
                pass  # entries that are no small integers: numbers such as 1.0 still count below
        ones = mask.count(1)
        if ones + mask.count(0) != len(mask):
            other = next(value for value in mask if value not in (0, 1))
            raise ValueError(f"with entries other than 0 and 1, such as {other!r:.40}")
        return ones
    if isinstance(mask, bytes | bytearray):
        return _count_array(np.frombuffer(mask, dtype=np.uint8))
    if isinstance(mask, Tensor):
        if mask.device.type != "cpu" or mask.dtype == torch.bfloat16:
            return _count_tensor(mask)
        mask = mask.detach().numpy()
    if isinstance(mask, np.ndarray):
        return _count_array(mask)
    raise TypeError(f"of type {type(mask).__name__}")


def count_masks(masks: Sequence[Any]) -> list[int] | None:
    """``count_mask`` for many masks at once: all lists of small integers, or all arrays of bools or integers.

    Entries are checked some rows at a time, which spares calls per row and keeps the copy small.

    Returns:
        None if the masks are of another kind, or not all entries are 0 or 1.
    """
    kinds = set(map(type, masks))
    if kinds == {np.ndarray}:
        if set(map(_NDIM, masks)) != {1} or any(dtype.kind not in "bui" for dtype in set(map(_DTYPE, masks))):
            return None
    elif kinds != {list}:
        return None
    counts: list[int] = []
    mean = sum(map(len, masks)) // len(masks)
    step = max(_ROWS_AT_A_TIME, _ENTRIES_AT_A_TIME // max(mean, 1))
    for first in range(0, len(masks), step):
        rows = masks[first : first + step]
        if kinds == {list}:
            try:
                together = np.frombuffer(b"".join(map(bytearray, rows)), np.uint8)
            except (TypeError, ValueError):
                return None
        else:
            together = np.concatenate(rows)
        kind = together.dtype.kind
        if kind not in "bui" or together.max(initial=0) > 1 or (kind == "i" and together.min(initial=0) < 0):
            return None
        ends = list(accumulate(map(len, rows), initial=0))
        if mean < _SHORT:
            # A running count spares a call per row, which costs as much as hundreds of entries.
            running = np.concatenate([[0], np.cumsum(together != 0)])
            counts.extend(np.diff(running[ends]).tolist())
        else:
            counts.extend(int(np.count_nonzero(together[start:end])) for start, end in pairwise(ends))
    return counts


def count_each_mask(masks: Sequence[Any]) -> tuple[list[int], dict[int, str]]:
    """Number of ones of each mask, 0 for what is none; and of these rows, what they are.

    >>> count_each_mask([[1, 0, 1], None, [2]])
    ([2, 0, 0], {1: 'of type NoneType', 2: 'with entries other than 0 and 1, such as 2'})
    """
    counts = count_masks(masks)
    if counts is not None:
        return counts, {}
    counts, problems = [0] * len(masks), {}
    for row, mask in enumerate(masks):
        try:
            counts[row] = count_mask(mask)
        except (TypeError, ValueError, RuntimeError) as problem:  # the last of tensors that have no values
            problems[row] = str(problem).partition("\n")[0]
    return counts, problems


def _count_array(mask: np.ndarray[Any, Any]) -> int:
    if mask.ndim != 1:
        raise ValueError(f"of shape {mask.shape}")
    if mask.dtype.kind not in "biuf":
        raise TypeError(f"of dtype {mask.dtype}")
    ones = int(np.count_nonzero(mask))
    kind = mask.dtype.kind
    # Entries of at most 1 that are not 0 add up to their number only if all of them are 1.
    if ones and kind != "b" and (mask.max() > 1 or (kind != "u" and mask.sum(dtype=float) != ones)):
        raise ValueError(f"with entries other than 0 and 1, such as {mask[(mask != 0) & (mask != 1)][0]}")
    return ones


def _count_tensor(mask: Tensor) -> int:
    if mask.ndim != 1:
        raise ValueError(f"of shape {tuple(mask.shape)}")
    ones = int(torch.count_nonzero(mask == 1))
    if ones != int(torch.count_nonzero(mask)):
        raise ValueError("with entries other than 0 and 1")
    return ones
