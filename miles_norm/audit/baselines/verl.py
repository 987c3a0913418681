"""verl, where each row is an observation of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.audit.baselines.moments import EPSILON, Moments, asks_for_scale, given_rewards, segment_moments
from miles_norm.result import NormalizedRewards

__all__ = ["of_one_value", "verl_advantages"]


def verl_advantages(result: NormalizedRewards) -> Tensor:
    """``(reward - mean) / (std + 1e-6)`` over the rows of a prompt in float32; a prompt with one row has mean 0, std 1.

    Without ``grpo_std_normalization`` (verl's ``norm_adv_by_std_in_grpo``) only the mean is subtracted.

    Source: the estimator ``grpo`` of verl 0.9.1, with the prompt group for its uid.

    Returns:
        float32 ``[N]``.

    Raises:
        ConfigError: another estimator, or rewards that pass through.
        MissingRewardError: a reward of None.
    """
    scale = asks_for_scale(result.config, "verl", passes=False)
    rewards = given_rewards(result, "verl").to(torch.float32)
    group = result.index.row_group
    moments = of_one_value(segment_moments(rewards, group, result.index.num_groups))
    centred = rewards - moments.mean[group]
    return centred / (moments.std[group] + EPSILON) if scale else centred


def of_one_value(moments: Moments) -> Moments:
    """verl's rule for a group of one: mean 0 and deviation 1, which leave the reward."""
    one = moments.count == 1
    return Moments(moments.count, moments.mean.masked_fill(one, 0.0), moments.std.masked_fill(one, 1.0))
