"""Advantages for pass@k: what a rollout adds to the best of k."""

import torch
from torch import Tensor

from miles_norm.errors import GroupingError, RewardError, format_rows
from miles_norm.statistics import SegmentStatistics, square_root

__all__ = ["analytic_pass_at_k_advantages", "topk_gap_advantages"]


def topk_gap_advantages(rewards: Tensor, group: Tensor, statistics: SegmentStatistics, counted: Tensor) -> Tensor:
    r"""The best rollout of a group gets its lead over the second best, all others get 0.

    .. math:: A_i = r_{(1)} - r_{(2)} \text{ for the best rollout, else } 0

    Source: the leave-one-out estimate of max@k for k = n (arXiv:2503.19595). Why: only the best rollout changes the
    maximum, and by no more than its lead.

    Args:
        rewards: float64 ``[R]``, one per rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.
        counted: bool ``[R]``.

    Returns:
        float64 ``[R]``, in units of the reward; all 0 where several rollouts are best.

    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([1.0, 4.0, 3.0], dtype=torch.float64)
    >>> group, statistics = torch.zeros(3, dtype=torch.int64), segment_statistics(rewards, torch.tensor([3]))
    >>> topk_gap_advantages(rewards, group, statistics, torch.ones(3, dtype=torch.bool)).tolist()
    [0.0, 1.0, 0.0]
    """
    best = counted & (rewards == statistics.maximum[group])
    groups = len(statistics.count)
    leaders = statistics.count.new_zeros(groups).index_add_(0, group, best.to(torch.int64))
    others = torch.where(counted & ~best, rewards, -torch.inf)
    second = rewards.new_full((groups,), -torch.inf).scatter_reduce_(0, group, others, "amax")
    lead = torch.where((leaders == 1) & (second > -torch.inf), statistics.maximum - second, 0.0)
    return torch.where(best, lead[group], 0.0)


def analytic_pass_at_k_advantages(
    rewards: Tensor, group: Tensor, statistics: SegmentStatistics, counted: Tensor, *, k: int
) -> Tensor:
    r"""Advantage of a rollout averaged over all groups of k that can be drawn from its n siblings, for rewards 0 and 1.

    With n rollouts, N of them wrong, :math:`\bar R = 1 - \binom{N}{k} / \binom{n}{k}` is the chance that k of them
    hold a right one and :math:`\sigma = \sqrt{\bar R (1 - \bar R)}` its deviation:

    .. math:: A_\text{right} = \frac{1 - \bar R}{\sigma}, \qquad
              A_\text{wrong} = \frac{1 - \bar R - \binom{N-1}{k-1} / \binom{n-1}{k-1}}{\sigma}

    Source: Pass@k Training (arXiv:2508.10751).

    Args:
        rewards: float64 ``[R]``, 0 or 1 for each counted rollout.
        group: int64 ``[R]``, the group of each rollout.
        statistics: Of the ``[G]`` groups, over their counted rollouts.
        counted: bool ``[R]``.
        k: Rollouts drawn, at least 1 and at most the size of every group.

    Returns:
        float64 ``[R]``; 0 where k of the group always or never hold a right one.

    Raises:
        RewardError: a counted reward that is neither 0 nor 1; ``rows`` are the numbers of all such rollouts.
        GroupingError: a group with fewer than k counted rollouts; ``rows`` are the numbers of all such groups.

    >>> from miles_norm.statistics import segment_statistics
    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # N = 3, k = 2: R = 1 - 3/6, sigma = 1/2
    >>> group, statistics = torch.zeros(4, dtype=torch.int64), segment_statistics(rewards, torch.tensor([4]))
    >>> counted = torch.ones(4, dtype=torch.bool)
    >>> [round(a, 4) for a in analytic_pass_at_k_advantages(rewards, group, statistics, counted, k=2).tolist()]
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    _check_binary(rewards, counted)
    n = statistics.count.to(torch.float64)
    small = torch.nonzero((statistics.count < k) & (statistics.count > 0))[:, 0].tolist()
    if small:
        raise GroupingError(
            format_rows(small, "prompt group number"),
            got="fewer counted rollouts than k: " + ", ".join(str(int(statistics.count[g])) for g in small[:10]),
            expected=f"at least {k} in every group (k is {k})",
            reason="k rollouts cannot be drawn from fewer",
            remedy="lower k, or sample more rollouts per prompt; min_group_size leaves small groups out",
            rows=small,
        )
    if not bool((statistics.count > 0).any()):
        return torch.zeros_like(rewards)
    wrong = n - statistics.total
    all_wrong = _draws(wrong, n, k)
    sigma = square_root((1 - all_wrong) * all_wrong)
    sigma = torch.where(sigma > 0, sigma, torch.inf)
    others_wrong = _draws(wrong - 1, n - 1, k - 1)
    return torch.where(rewards == 1, (all_wrong / sigma)[group], ((all_wrong - others_wrong) / sigma)[group])


def _check_binary(rewards: Tensor, counted: Tensor) -> None:
    bad = torch.nonzero(counted & (rewards != 0) & (rewards != 1))[:, 0].tolist()
    if bad:
        raise RewardError(
            f"reward of {format_rows(bad, 'rollout number')}",
            got=", ".join(f"{rewards[rollout].item():g}" for rollout in bad[:10]),
            expected="0 or 1 (pass_at_k is 'analytic')",
            reason="the formula counts right and wrong rollouts",
            remedy="make the rewards binary, or choose the kind 'topk_gap'",
            rows=bad,
        )


def _draws(wrong: Tensor, n: Tensor, k: int) -> Tensor:
    """Chance that k draws without replacement from n, of which ``wrong`` are wrong, are all wrong."""
    chance = torch.ones_like(n)
    for drawn in range(k):
        chance = chance * ((wrong - drawn) / (n - drawn).clamp(min=1)).clamp(min=0)
    return chance
