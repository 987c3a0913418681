"""Mean, deviation and range of every segment, by a rule whose bits depend only on the sorted values of the segment.

The values of a segment are sorted, then added as a binary tree over adjacent pairs: ``((v0 + v1) + (v2 + v3)) + ...``.
The shape of the tree depends on positions alone and a missing leaf counts as 0, so neither the order of the input, nor
the other segments, nor the width of the buffer, nor the device changes a bit. A running sum or an atomic add would.

On a CPU segments are worked on in blocks of equal width (the next power of two), a bounded number of values at a time,
so that one huge segment beside many small ones costs at most twice its size. On another device all segments go through
the tree side by side, in as many steps as the longest one needs, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SegmentStatistics", "counts_of", "segment_statistics", "square_root"]

SQUARE_UNDERFLOW = 2.0**-500
"""A range below this cannot be squared in float64, so its values count as equal."""

Array = np.ndarray[Any, Any]

_BLOCK_CELLS = 2**18
_SPARE_CELLS = 2**12
_POWERS_OF_TWO = tuple(2**k for k in range(63))


@dataclass(frozen=True, eq=False)
class SegmentStatistics:
    """Statistics of S segments; float64 ``[S]``, 0 for a segment without values."""

    count: Tensor
    """int64: number of values."""
    longest: int
    """No segment has more values."""
    total: Tensor
    """Sum."""
    mean: Tensor
    """``total / count``; the value itself where all values are equal."""
    std: Tensor
    """Standard deviation with the given ``ddof``; 0 where all values are equal or there are not more than ``ddof``."""
    minimum: Tensor
    maximum: Tensor
    range: Tensor
    """``maximum - minimum``."""
    largest: Tensor
    """Largest absolute value."""
    equal: Tensor
    """bool: all values are equal, or range over no more than the tolerance; true for a segment of one or none."""


def square_root(values: Tensor) -> Tensor:
    """The correctly rounded root; torch's own is off by a bit for some values on a CPU, and by none on a GPU."""
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()


def counts_of(numbers: Tensor, size: int) -> Tensor:
    """int64 ``[size]``: how often each number from 0 on appears; the host waits for nothing.

    >>> counts_of(torch.tensor([0, 2, 2]), 4).tolist()
    [1, 0, 2, 0]
    """
    if numbers.device.type == "cpu":
        return torch.bincount(numbers, minlength=size)
    return numbers.new_zeros(size).index_add_(0, numbers, torch.ones_like(numbers))


def segment_statistics(
    values: Tensor, count: Tensor, *, ddof: int = 1, tolerance: float = 0.0, longest: int | None = None
) -> SegmentStatistics:
    r"""Two-pass statistics of segments that lie one after another in ``values``.

    .. math:: \mu = \frac{1}{n} \sum_i v_i, \qquad \sigma = \sqrt{\frac{1}{n - \mathrm{ddof}} \sum_i (v_i - \mu)^2}

    Why two passes: :math:`E[v^2] - E[v]^2` cancels and can turn negative for values that are nearly equal.

    Args:
        values: float64 ``[M]``, finite, segment after segment.
        count: int64 ``[S]``, the length of each segment; zeros are allowed; sums to M.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        tolerance: A range of at most this share of the largest absolute value counts as equal.
        longest: No segment is longer, which spares steps on a device; M if it is not known.

    >>> s = segment_statistics(torch.tensor([4.0, 2.0, 0.0, 0.7, 0.7], dtype=torch.float64), torch.tensor([3, 0, 2]))
    >>> s.mean.tolist(), s.std.tolist(), s.equal.tolist()
    ([2.0, 0.0, 0.7], [2.0, 0.0, 0.0], [False, True, True])
    """
    most = len(values) if longest is None else longest
    if values.device.type != "cpu":
        columns = _device_columns(values, count, most)
        return SegmentStatistics(count, most, *_summary(torch, columns, count, ddof, tolerance))
    # The same arithmetic by both names; numpy's calls cost less.
    host = [column.numpy() for column in _columns(values, count)]
    found = _summary(np, host, count.numpy(), ddof, tolerance)
    return SegmentStatistics(count, most, *map(torch.from_numpy, found))


def _summary(xp: Any, columns: Sequence[Any], count: Any, ddof: int, tolerance: float) -> tuple[Any, ...]:
    """Everything but the count, from sums and extremes, in numpy or torch."""
    total, mean, squares, low, high = columns
    spread = high - low
    largest = xp.maximum(high, -low)
    equal = (spread <= largest * tolerance) | (spread <= SQUARE_UNDERFLOW) if tolerance else spread <= SQUARE_UNDERFLOW
    std = xp.where(equal, 0.0, xp.sqrt(squares / (count - ddof).clip(1)))
    return total, xp.where(spread == 0, low, mean), std, low, high, spread, largest, equal


def _columns(values: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """Sum, mean, sum of squared deviations, minimum and maximum of each segment."""
    if not len(values):
        return values.new_zeros((5, len(count))).unbind()
    start = torch.cumsum(count, 0) - count
    out: tuple[Tensor, ...] = ()
    for chosen, width in _blocks(count, len(values)):
        if chosen is None:
            return _block(values, start, count, width)
        out = out or values.new_zeros((5, len(count))).unbind()
        for column, part in zip(out, _block(values, start[chosen], count[chosen], width), strict=True):
            if isinstance(chosen, slice):
                column[chosen] = part
            else:
                column.index_copy_(0, chosen, part)
    return out


def _blocks(count: Tensor, values: int) -> Iterator[tuple[slice | Tensor | None, int]]:
    """Split the segments into selections of one width; None selects all, a slice costs no copy."""
    segments = len(count)
    width = _width(int(count.max()))
    if segments * width <= 2 * values + _SPARE_CELLS:
        step = max(1, _BLOCK_CELLS // width)
        if segments <= step:
            yield None, width
        else:
            yield from ((slice(first, first + step), width) for first in range(0, segments, step))
        return
    exponent = torch.bucketize(count, torch.tensor(_POWERS_OF_TWO, device=count.device))  # count <= 2**exponent
    for k, present in enumerate(torch.bincount(exponent).tolist()):
        if present:
            chosen = torch.nonzero(exponent == k)[:, 0]
            yield from ((part, 1 << k) for part in chosen.split(max(1, _BLOCK_CELLS >> k)))


def _width(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _block(values: Tensor, start: Tensor, count: Tensor, width: int) -> tuple[Tensor, ...]:
    """What ``_columns`` gives, for segments no longer than ``width``."""
    return tuple(map(torch.from_numpy, _host_block(values.numpy(), start.numpy(), count.numpy(), width)))


def _host_block(values: Array, start: Array, count: Array, width: int) -> tuple[Array, ...]:
    """``_block`` in numpy, which does the same arithmetic at a fraction of the cost of a call."""
    position = np.arange(width)
    index = start[:, None] + position
    np.minimum(index, len(values) - 1, out=index)
    table = values.take(index)
    del index
    outside = position >= count[:, None]
    table[outside] = np.inf
    table.sort(axis=1)
    length = np.maximum(count, 1)
    low, high = table[:, 0].copy(), table[np.arange(len(count)), length - 1]
    table[outside] = 0.0
    total = _tree_sum(table).copy()
    mean = total / length
    table -= mean[:, None]
    table *= table
    table[outside] = 0.0
    empty = count == 0
    low[empty] = 0.0
    high[empty] = 0.0
    return total, mean, _tree_sum(table), low, high


def _tree_sum(table: Array) -> Array:
    """Add adjacent columns until one is left; the width of ``table`` is a power of two."""
    while table.shape[1] > 1:
        table = table[:, 0::2] + table[:, 1::2]
    return table[:, 0]


def _device_columns(values: Tensor, count: Tensor, longest: int) -> tuple[Tensor, ...]:
    """What ``_columns`` gives, without a shape or a step that depends on values."""
    if not len(values):
        return values.new_zeros((5, len(count))).unbind()
    start = torch.cumsum(count, 0) - count
    segment = torch.repeat_interleave(torch.arange(len(count), device=count.device), count, output_size=len(values))
    order = torch.sort(values, stable=True).indices
    order = order[torch.sort(segment[order], stable=True).indices]
    table = values[order]
    # How many values of its segment follow each one, itself among them.
    left = (start + count)[segment] - torch.arange(len(values), device=values.device)
    length, empty = count.clamp(min=1), count == 0
    first = start.clamp(max=len(values) - 1)
    total = _device_tree_sum(table, left, longest)[first].masked_fill(empty, 0.0)
    mean = total / length
    squares = _device_tree_sum((table - mean[segment]).square(), left, longest)[first].masked_fill(empty, 0.0)
    low, high = (
        table[place].masked_fill(empty, 0.0) for place in (first, (start + length - 1).clamp(max=len(values) - 1))
    )
    return total, mean, squares, low, high


def _device_tree_sum(table: Tensor, left: Tensor, longest: int) -> Tensor:
    """``_tree_sum`` of all segments at once; the first value of each becomes its sum.

    A value that is no multiple of the step from the start of its segment adds up what nobody asks for.
    """
    step = 1
    while step < longest:
        table = table + torch.where(left > step, torch.roll(table, -step), 0.0)
        step *= 2
    return table
