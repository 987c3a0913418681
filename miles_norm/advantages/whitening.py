"""Bring advantages to one scale over the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from miles_norm.statistics import segment_statistics

__all__ = ["batch_moments", "rescaled", "whitened"]

EQUAL = 1e-12
"""Advantages of different groups that range over no more than this share of the largest differ by rounding alone."""


def whitened(
    advantages: Tensor,
    counted: Tensor,
    *,
    tokens: Tensor | None = None,
    shift: bool = False,
    ddof: int = 1,
    std_epsilon: float = 1e-6,
) -> Tensor:
    r"""Divide advantages by their standard deviation over the batch.

    .. math:: A_i' = \frac{A_i - [\text{shift}]\, m}{s + \epsilon}, \qquad m = \frac{\sum_i w_i A_i}{\sum_i w_i},
              \qquad s^2 = \frac{\sum_i w_i (A_i - m)^2}{\sum_i w_i - \mathrm{ddof}}

    Source: the batch stage of REINFORCE++ (arXiv:2501.03262). Why no shift unless asked for: group baselines have
    centred the advantages already, and a shift changes the sign of those near 0.

    Args:
        advantages: float64 ``[R]``.
        counted: bool ``[R]``; only these enter m and s.
        tokens: int64 ``[R]``, trainable tokens as weights w; None weighs every rollout 1.
        shift: Subtract m as well.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        std_epsilon: Added to s.

    Returns:
        float64 ``[R]``. With fewer than two counted rollouts that have weight, or where these differ by no more than
        rounding (1e-12 of the largest), there is no scale, and nothing is changed.

    >>> advantages = torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64)  # deviation 2
    >>> [round(a, 5) for a in whitened(advantages, torch.ones(3, dtype=torch.bool)).tolist()]
    [1.0, -1.0, 0.0]
    """
    moments = batch_moments(advantages, counted, tokens=tokens, ddof=ddof)
    return advantages if moments is None else rescaled(advantages, moments, shift=shift, std_epsilon=std_epsilon)


def rescaled(advantages: Tensor, moments: tuple[float, float], *, shift: bool, std_epsilon: float) -> Tensor:
    """Advantages over the deviation, the mean subtracted before if ``shift`` is set; ``moments`` are these two."""
    mean, std = moments
    return (advantages - mean if shift else advantages) / (std + std_epsilon)


def batch_moments(
    advantages: Tensor, counted: Tensor, *, tokens: Tensor | None = None, ddof: int = 1
) -> tuple[float, float] | None:
    """Mean and deviation of ``whitened``; None where there is no scale."""
    values = advantages[counted]
    largest = values.abs().max() if len(values) else 0.0
    weight = torch.ones_like(values) if tokens is None else tokens[counted].to(torch.float64)
    values, weight = values[weight > 0], weight[weight > 0]
    if len(values) < 2:
        return None
    low, high = torch.aminmax(values)
    if bool(high - low <= largest * EQUAL):
        return None
    total = float(weight.sum())  # whole numbers: exact in any order
    mean = _sum(weight * values) / total
    return mean, math.sqrt(_sum(weight * (values - mean).square()) / (total - ddof))


def _sum(values: Tensor) -> float:
    """A sum whose bits do not depend on the order of the values."""
    return float(segment_statistics(values, torch.tensor([len(values)], device=values.device)).total)
