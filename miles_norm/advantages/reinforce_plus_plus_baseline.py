"""Advantages of REINFORCE++-baseline: the group stage, before any whitening over the batch."""

from torch import Tensor

from miles_norm.statistics import SegmentStatistics

__all__ = ["reinforce_plus_plus_baseline_advantages"]


def reinforce_plus_plus_baseline_advantages(rewards: Tensor, group: Tensor, statistics: SegmentStatistics) -> Tensor:
    r"""Distance of each rollout's reward from its group's mean.

    .. math:: A_i = r_i - \mu_g

    Source: REINFORCE++ (arXiv:2501.03262), the variant with a group baseline. Why no division by the group's deviation:
    the method scales once over the batch instead, which trainers such as Miles do after the reward hook.
    ``grpo_std_normalization`` is not read.

    Args:
        rewards: float64 ``[R]``, one per rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.

    Returns:
        float64 ``[R]``, in units of the reward; 0 for a group of one.

    >>> import torch
    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([0.0, 4.0], dtype=torch.float64)
    >>> statistics = segment_statistics(rewards, torch.tensor([2]))
    >>> reinforce_plus_plus_baseline_advantages(rewards, torch.zeros(2, dtype=torch.int64), statistics).tolist()
    [-2.0, 2.0]
    """
    return rewards - statistics.mean[group]
