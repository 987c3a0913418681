"""Leave-one-out advantages of RLOO."""

from torch import Tensor

from miles_norm.statistics import SegmentStatistics

__all__ = ["rloo_advantages"]


def rloo_advantages(rewards: Tensor, group: Tensor, statistics: SegmentStatistics) -> Tensor:
    r"""Distance of each rollout's reward from the mean of the other rollouts of its group.

    .. math:: A_i = r_i - \frac{1}{n_g - 1} \sum_{j \ne i} r_j = \frac{n_g}{n_g - 1} (r_i - \mu_g)

    Source: Back to Basics (arXiv:2402.14740). Why the others only: a baseline that contains the rollout's own
    reward biases the gradient by the factor :math:`(n_g - 1) / n_g`. The right-hand form is computed, since it does not
    cancel when rewards are large and nearly equal.

    Args:
        rewards: float64 ``[R]``, one per rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.

    Returns:
        float64 ``[R]``, in units of the reward. A group of one has no others; it is set by the caller.

    >>> import torch
    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)  # others' means: 1, 2.5, 2.5
    >>> statistics = segment_statistics(rewards, torch.tensor([3]))
    >>> rloo_advantages(rewards, torch.zeros(3, dtype=torch.int64), statistics).tolist()
    [3.0, -1.5, -1.5]
    """
    centred = rewards - statistics.mean[group]
    n = statistics.count.to(rewards.dtype)
    return centred * (n / (n - 1).clamp(min=1))[group]
