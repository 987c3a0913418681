"""Intervals for means over independent batches that all hold at once.

Each of the ``tests`` numbers of a question gets the level ``1 - 0.05 / tests`` (Bonferroni), so that with probability
95% none of the intervals misses what it is for, whatever the numbers have to do with each other. The intervals of the
parameters are a box; what is said of the length of a vector, or of its angle, is the range over that box. A length is 0
in the box exactly if the interval of every parameter holds 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

LEVEL = 0.95


def critical_value(tests: int, batches: int) -> float:
    """Standard errors on either side: the quantile of Student's t, by its expansion (Abramowitz and Stegun 26.7.5).

    >>> round(critical_value(1, 101), 3), round(critical_value(1000, 101), 2)  # tables have 1.984 and 4.21
    (1.984, 4.21)
    """
    z, n = NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / tests), batches - 1
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


@dataclass(frozen=True)
class Range:
    """A number and its interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Range:
        """In another unit."""
        return Range(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Box:
    """Means of vectors, and half the width of the interval of each number."""

    mean: Tensor
    error: Tensor
    """Standard errors."""
    critical: float

    @classmethod
    def of(cls, values: Tensor, critical: float) -> Box:
        """Of independent vectors ``[B, d]``."""
        return cls(values.mean(dim=0), values.std(dim=0) / math.sqrt(len(values)), critical)

    @property
    def half(self) -> Tensor:
        """Half the width of each interval."""
        return self.critical * self.error

    @property
    def holds_zero(self) -> bool:
        """Whether the interval of every number holds 0."""
        return bool((self.mean.abs() <= self.half).all())

    @property
    def largest_z(self) -> float:
        """The mean that is most standard errors away from 0; 0 where all are 0."""
        return float(torch.where(self.mean == 0, 0.0, self.mean.abs() / self.error).max())

    def length(self) -> Range:
        """Of the mean vector."""
        near = (self.mean.abs() - self.half).clamp(min=0)
        far = self.mean.abs() + self.half
        return Range(*(float(vector.norm()) for vector in (self.mean, near, far)))

    def number(self, index: int) -> Range:
        """One of the means."""
        mean, half = float(self.mean[index]), float(self.half[index])
        return Range(mean, mean - half, mean + half)

    def angle(self) -> Range:
        """Between the mean vector and the first axis, in degrees."""
        along = self.number(0)
        aside = Box(self.mean[1:], self.error[1:], self.critical).length()
        ends = ((aside.value, along.value), (aside.low, along.high), (aside.high, along.low))
        return Range(*(math.degrees(math.atan2(y, x)) for y, x in ends))


def axes_along(direction: Tensor) -> Tensor:
    """Orthonormal axes ``[d, d]`` in columns, of which the first is that of ``direction``."""
    start = torch.eye(len(direction), dtype=direction.dtype)
    start[:, 0] = direction
    axes: Tensor = torch.linalg.qr(start).Q
    return -axes if float(axes[:, 0] @ direction) < 0 else axes
