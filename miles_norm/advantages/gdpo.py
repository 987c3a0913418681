"""Advantages of GDPO: every reward component is normalized on its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_norm.advantages.grpo import grpo_advantages
from miles_norm.advantages.whitening import whitened
from miles_norm.statistics import SegmentStatistics

__all__ = ["gdpo_advantages"]


def gdpo_advantages(
    components: Mapping[str, tuple[Tensor, SegmentStatistics]],
    weights: Mapping[str, float],
    group: Tensor,
    counted: Tensor,
    *,
    ddof: int = 1,
    std_epsilon: float = 1e-6,
) -> Tensor:
    r"""Weighted sum of the components' normalized rewards, divided by its deviation over the batch.

    .. math:: s_i = \sum_c w_c \frac{r_{i,c} - \mu_{g,c}}{\sigma_{g,c} + \epsilon}, \qquad
              A_i = \frac{s_i}{\sigma_\text{batch}(s) + \epsilon}

    Source: GDPO (arXiv:2601.05242). Why: the sum of several rewards maps different combinations to one number, and
    normalizing it loses what distinguishes them. The division keeps the scale the same for any number of components.

    Args:
        components: Per component float64 ``[R]``, NaN where a rollout lacks it, which adds 0; and its statistics over
            the counted rollouts of the ``[G]`` groups that have it.
        weights: One per component.
        group: int64 ``[R]``, the group of each rollout.
        counted: bool ``[R]``; the batch deviation is taken over these.
        ddof: Of the deviation over the batch.
        std_epsilon: Added to every deviation.

    Returns:
        float64 ``[R]``, in standard deviations of the batch. A component that is equal in all rollouts of a group adds
        exactly 0 there.

    >>> from miles_norm.statistics import segment_statistics
    >>> group, all_count = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    >>> components = {"right": torch.tensor([1.0, 0.0]).double(), "short": torch.tensor([0.3, 0.3]).double()}
    >>> components = {n: (value, segment_statistics(value, torch.tensor([2]))) for n, value in components.items()}
    >>> weights = {"right": 1.0, "short": 1.0}
    >>> [round(a, 4) for a in gdpo_advantages(components, weights, group, all_count).tolist()]
    [0.7071, -0.7071]
    """
    total = torch.zeros(len(group), dtype=torch.float64, device=group.device)
    for name, (value, statistics) in components.items():
        normalized = grpo_advantages(value, group, statistics, std_epsilon=std_epsilon)
        silent = statistics.equal[group] | torch.isnan(value)
        total += weights[name] * normalized.masked_fill(silent, 0.0)
    return whitened(total, counted, ddof=ddof, std_epsilon=std_epsilon)
