"""slime, which forms groups by counting rows."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.audit.baselines.moments import EPSILON, asks_for_scale, given_rewards, segment_moments
from miles_norm.errors import ConfigError
from miles_norm.result import NormalizedRewards

__all__ = ["slime_advantages"]


def slime_advantages(result: NormalizedRewards) -> Tensor:
    """Rows in contiguous groups of ``n_samples_per_prompt`` if there are exactly as many as a batch of prompts gives.

    Else all rows of the batch are one group. Ids of prompts and rollouts are not looked at, so on fan-out the count
    fits by chance or not at all. The mean is subtracted, and divided by std + 1e-6 for ``grpo`` and ``gspo``, in
    float32; a group of one row is NaN then, and so is a whole group with a reward of NaN.

    Source: the default post-processing of rewards of slime (624b824a8).

    Returns:
        float32 ``[N]``.

    Raises:
        ConfigError: ``n_samples_per_prompt`` or ``rollout_batch_size`` is not set; an estimator that slime lacks.
        MissingRewardError: a reward of None.
    """
    config = result.config
    scale = asks_for_scale(config, "slime", "reinforce_plus_plus_baseline")
    rewards = given_rewards(result, "slime").to(torch.float32)
    if scale is None:
        return rewards
    size, batch = config.n_samples_per_prompt, config.rollout_batch_size
    if size is None or batch is None:
        raise ConfigError(
            "baseline 'slime'",
            got=f"n_samples_per_prompt={size}, rollout_batch_size={batch}",
            expected="both numbers",
            reason="slime forms its groups by comparing their product with the number of rows",
            remedy="set both as the run had them, for example --set n_samples_per_prompt=8 --set rollout_batch_size=32",
        )
    row = torch.arange(len(rewards), device=rewards.device)
    group = row.div(size, rounding_mode="floor") if len(rewards) == size * batch else torch.zeros_like(row)
    moments = segment_moments(rewards, group, int(group[-1]) + 1)
    centred = rewards - moments.mean[group]
    return centred / (moments.std[group] + EPSILON) if scale else centred
