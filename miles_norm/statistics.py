"""Mean, deviation and range of every segment, by a rule whose bits depend only on the sorted values of the segment.

The values of a segment are sorted, then added as a binary tree over adjacent pairs: ``((v0 + v1) + (v2 + v3)) + ...``.
The shape of the tree depends on positions alone and a missing leaf counts as 0, so neither the order of the input, nor
the other segments, nor the width of the buffer, nor the device changes a bit. A running sum or an atomic add would.

Segments are worked on in blocks of equal width (the next power of two), a bounded number of values at a time, so that
one huge segment beside many small ones costs at most twice its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SegmentStatistics", "plain", "segment_statistics"]

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


def plain(values: Tensor) -> Any:
    """The numpy view of a tensor on the CPU, where a call costs less; a tensor elsewhere as it is."""
    return values.numpy() if values.device.type == "cpu" else values


def segment_statistics(values: Tensor, count: Tensor, *, ddof: int = 1, tolerance: float = 0.0) -> SegmentStatistics:
    r"""Two-pass statistics of segments that lie one after another in ``values``.

    .. math:: \mu = \frac{1}{n} \sum_i v_i, \qquad \sigma = \sqrt{\frac{1}{n - \mathrm{ddof}} \sum_i (v_i - \mu)^2}

    Why two passes: :math:`E[v^2] - E[v]^2` cancels and can turn negative for values that are nearly equal.

    Args:
        values: float64 ``[M]``, finite, segment after segment.
        count: int64 ``[S]``, the length of each segment; zeros are allowed; sums to M.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        tolerance: A range of at most this share of the largest absolute value counts as equal.

    >>> s = segment_statistics(torch.tensor([4.0, 2.0, 0.0, 0.7, 0.7], dtype=torch.float64), torch.tensor([3, 0, 2]))
    >>> s.mean.tolist(), s.std.tolist(), s.equal.tolist()
    ([2.0, 0.0, 0.7], [2.0, 0.0, 0.0], [False, True, True])
    """
    columns = _columns(values, count)
    if values.device.type == "cpu":
        # The same arithmetic by both names; numpy's calls cost less.
        host = _summary(np, [column.numpy() for column in columns], count.numpy(), ddof, tolerance)
        return SegmentStatistics(count, *map(torch.from_numpy, host))
    return SegmentStatistics(count, *_summary(torch, columns, count, ddof, tolerance))


def _summary(xp: Any, columns: Sequence[Any], count: Any, ddof: int, tolerance: float) -> tuple[Any, ...]:
    """Everything but the count, from sums and extremes, in numpy or torch."""
    total, mean, squares, low, high = columns
    spread = high - low
    largest = xp.maximum(high, -low)
    equal = (spread <= largest * tolerance) | (spread <= SQUARE_UNDERFLOW) if tolerance else spread <= SQUARE_UNDERFLOW
    std = xp.sqrt(squares / (count - ddof).clip(1))
    std[equal] = 0.0
    return total, xp.where(spread == 0, low, mean), std, low, high, spread, largest, equal


def _columns(values: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """Sum, mean, sum of squared deviations, minimum and maximum of each segment."""
    if not len(values):
        return values.new_zeros((5, len(count))).unbind()
    start = torch.cumsum(count, 0) - count
    out: tuple[Tensor, ...] = ()
    for chosen, width in _blocks(count, len(values), values.device.type == "cpu"):
        if chosen is None:
            return _block(values, start, count, width)
        out = out or values.new_zeros((5, len(count))).unbind()
        for column, part in zip(out, _block(values, start[chosen], count[chosen], width), strict=True):
            if isinstance(chosen, slice):
                column[chosen] = part
            else:
                column.index_copy_(0, chosen, part)
    return out


def _blocks(count: Tensor, values: int, bounded: bool) -> Iterator[tuple[slice | Tensor | None, int]]:
    """Split the segments into selections of one width; None selects all, a slice costs no copy."""
    segments = len(count)
    width = _width(int(count.max()))
    if segments * width <= 2 * values + _SPARE_CELLS:
        step = max(1, _BLOCK_CELLS // width) if bounded else segments
        if segments <= step:
            yield None, width
        else:
            yield from ((slice(first, first + step), width) for first in range(0, segments, step))
        return
    exponent = torch.bucketize(count, torch.tensor(_POWERS_OF_TWO, device=count.device))  # count <= 2**exponent
    for k, present in enumerate(torch.bincount(exponent).tolist()):
        if present:
            chosen = torch.nonzero(exponent == k)[:, 0]
            yield from ((part, 1 << k) for part in chosen.split(max(1, _BLOCK_CELLS >> k) if bounded else segments))


def _width(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _block(values: Tensor, start: Tensor, count: Tensor, width: int) -> tuple[Tensor, ...]:
    """What ``_columns`` gives, for segments no longer than ``width``."""
    if values.device.type == "cpu":
        # numpy does the same arithmetic at a fraction of the cost of a call, which is what small batches pay.
        columns = _host_block(values.numpy(), start.numpy(), count.numpy(), width)
        return tuple(map(torch.from_numpy, columns))
    position = torch.arange(width, device=values.device)
    index = (start[:, None] + position).clamp_(max=len(values) - 1)
    outside = position >= count[:, None]
    table = torch.sort(values[index].masked_fill_(outside, torch.inf), dim=1).values
    length = count.clamp(min=1)  # a segment without values reads one that is masked
    low, high = table[:, 0].clone(), table.gather(1, length[:, None] - 1)[:, 0]
    total = _tree_sum(table.masked_fill_(outside, 0.0)).clone()  # of a table of one column it is a view
    mean = total / length
    squares = _tree_sum(table.sub_(mean[:, None]).square_().masked_fill_(outside, 0.0))
    empty = count == 0
    return total, mean, squares, low.masked_fill_(empty, 0.0), high.masked_fill_(empty, 0.0)


def _host_block(values: Array, start: Array, count: Array, width: int) -> tuple[Array, ...]:
    """``_block`` in numpy, step by step the same."""
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


def _tree_sum(table: Any) -> Any:
    """Add adjacent columns until one is left; the width of ``table`` is a power of two."""
    while table.shape[1] > 1:
        table = table[:, 0::2] + table[:, 1::2]
    return table[:, 0]
