"""Group-relative advantages of GRPO, used unchanged by GSPO."""

from torch import Tensor

from miles_norm.statistics import SegmentStatistics

__all__ = ["grpo_advantages"]


def grpo_advantages(
    rewards: Tensor, group: Tensor, statistics: SegmentStatistics, *, std_epsilon: float | None = 1e-6
) -> Tensor:
    r"""Distance of each rollout's reward from its group's mean, in standard deviations of the group.

    .. math:: A_i = \frac{r_i - \mu_g}{\sigma_g + \epsilon}

    Source: DeepSeekMath (arXiv:2402.03300, Sec. 4.1.2). GSPO (arXiv:2507.18071) keeps the advantage and changes
    the importance ratio of the loss. Why :math:`\epsilon` after the root: a group with a tiny deviation stays bounded.

    Args:
        rewards: float64 ``[R]``, one per rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.
        std_epsilon: Added to the standard deviation; None leaves the division out (``grpo_std_normalization=False``).

    Returns:
        float64 ``[R]``, in standard deviations (without the division: in units of the reward). Groups whose rewards are
        all equal, and groups of one, are set by the caller.

    >>> import torch
    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)  # mean 1/2, std sqrt(1/3)
    >>> statistics = segment_statistics(rewards, torch.tensor([4]))
    >>> [round(a, 4) for a in grpo_advantages(rewards, torch.zeros(4, dtype=torch.int64), statistics).tolist()]
    [0.866, -0.866, -0.866, 0.866]
    """
    centred = rewards - statistics.mean.index_select(0, group)
    return centred if std_epsilon is None else centred / (statistics.std + std_epsilon).index_select(0, group)
