"""Advantages of OPO: the baseline is weighted by the length of the rollouts."""

import torch
from torch import Tensor

from miles_norm.statistics import SegmentStatistics, segment_statistics

__all__ = ["opo_advantages"]


def opo_advantages(
    rewards: Tensor, group: Tensor, statistics: SegmentStatistics, *, tokens: Tensor, members: Tensor | None = None
) -> Tensor:
    r"""Distance of each rollout's reward from the length-weighted mean of its group.

    .. math:: A_i = r_i - \frac{\sum_j L_j r_j}{\sum_j L_j}

    Source: On-Policy RL with Optimal Reward Baseline (arXiv:2505.23585). Why the weights: the baseline with the
    least variance weighs a rollout by the squared norm of its score, which grows about linearly with its length. The
    length :math:`L_j` is the number of trainable tokens of the whole rollout, over all its rows.

    Args:
        rewards: float64 ``[R]``, one per rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.
        tokens: int64 ``[R]``, trainable tokens of each rollout.
        members: int64, the counted rollouts group after group; None for all of them as they stand.

    Returns:
        float64 ``[R]``, in units of the reward. The plain mean is the baseline of a group without trainable tokens.

    >>> rewards, tokens = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([30, 10])  # baseline 30/40
    >>> group, statistics = torch.zeros(2, dtype=torch.int64), segment_statistics(rewards, torch.tensor([2]))
    >>> opo_advantages(rewards, group, statistics, tokens=tokens).tolist()
    [0.25, -0.75]
    """
    weighted = rewards * tokens
    if members is not None:
        weighted, tokens, group_of = weighted[members], tokens[members], group[members]
    else:
        group_of = group
    length = statistics.count.new_zeros(len(statistics.count)).index_add_(0, group_of, tokens)
    total = segment_statistics(weighted, statistics.count, longest=statistics.longest).total
    baseline = torch.where(length > 0, total / length.clamp(min=1), statistics.mean)
    return rewards - baseline[group]
