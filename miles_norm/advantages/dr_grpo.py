"""Advantages of Dr. GRPO: the group's mean is the baseline, and nothing is divided."""

from torch import Tensor

from miles_norm.statistics import SegmentStatistics

__all__ = ["dr_grpo_advantages"]


def dr_grpo_advantages(rewards: Tensor, group: Tensor, statistics: SegmentStatistics) -> Tensor:
    r"""Distance of each rollout's reward from its group's mean.

    .. math:: A_i = r_i - \mu_g

    Source: Understanding R1-Zero-like training (arXiv:2503.20783). Why no division: dividing by the group's
    deviation gives prompts that are nearly always or nearly never solved a larger weight. The paper's constant length
    normalization belongs to the loss, not to the advantage.

    Args:
        rewards: float64 ``[R]``, one per rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.

    Returns:
        float64 ``[R]``, in units of the reward; 0 for a group of one, whose reward is its own mean.

    >>> import torch
    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)
    >>> statistics = segment_statistics(rewards, torch.tensor([3]))
    >>> dr_grpo_advantages(rewards, torch.zeros(3, dtype=torch.int64), statistics).tolist()
    [2.0, -1.0, -1.0]
    """
    return rewards - statistics.mean[group]
