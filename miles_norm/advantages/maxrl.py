"""Advantages of MaxRL: relative distance from the group's mean."""

import torch
from torch import Tensor

from miles_norm.errors import RewardError, format_rows
from miles_norm.statistics import SegmentStatistics

__all__ = ["maxrl_advantages"]


def maxrl_advantages(rewards: Tensor, group: Tensor, statistics: SegmentStatistics) -> Tensor:
    r"""Distance of each rollout's reward from its group's mean, in units of that mean.

    .. math:: A_i = \frac{r_i - \mu_g}{\mu_g}

    Source: Maximum Likelihood Reinforcement Learning (arXiv:2602.02710). Why: the gradient of :math:`\log p` is that of
    the success rate :math:`p` divided by :math:`p`, so prompts that are rarely solved weigh more.

    Args:
        rewards: float64 ``[R]``, one per rollout, not negative; NaN where a rollout does not count.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.

    Returns:
        float64 ``[R]``, without a unit; 0 in a group whose mean is 0.

    Raises:
        RewardError: a negative reward; ``rows`` are the numbers of all such rollouts.

    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # mean 1/4
    >>> group, statistics = torch.zeros(4, dtype=torch.int64), segment_statistics(rewards, torch.tensor([4]))
    >>> maxrl_advantages(rewards, group, statistics).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    negative = torch.nonzero(rewards < 0)[:, 0].tolist()
    if negative:
        raise RewardError(
            f"reward of {format_rows(negative, 'rollout number')}",
            got=", ".join(f"{rewards[rollout].item():g}" for rollout in negative[:10]),
            expected="rewards of at least 0 (advantage_estimator is 'maxrl')",
            reason="the mean reward stands for a success rate, and a negative one turns the gradient around",
            remedy="shift the rewards so that a failure is 0, or choose another estimator",
            rows=negative,
        )
    mean = statistics.mean
    divisor = torch.where(mean > 0, mean, torch.inf)
    return (rewards - mean[group]) / divisor[group]
