"""Agent Lightning with rollout-level advantages: verl's rule on one row per rollout, in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.audit.baselines.moments import EPSILON, Moments, asks_for_scale, segment_moments
from miles_norm.audit.baselines.verl import of_one_value
from miles_norm.errors import DisagreeingRewardsError, format_rows
from miles_norm.result import NormalizedRewards

__all__ = ["agent_lightning_advantages"]


def agent_lightning_advantages(result: NormalizedRewards) -> Tensor:
    """Scores in bfloat16, the first row of each rollout normalized as in verl, each step rounded to bfloat16.

    A reward of None counts as 0. Source: Agent Lightning (c632d8dd) with ``enable_rollout_level_advantage``; without it
    rows are observations, as in the baseline ``verl``.

    Returns:
        float32 ``[N]``, values that bfloat16 can hold.

    Raises:
        ConfigError: another estimator than ``grpo``, ``gspo`` or ``dr_grpo``.
        DisagreeingRewardsError: siblings with different rewards, with which Agent Lightning stops.
    """
    scale = asks_for_scale(result.config, "agent-lightning", passes=False)
    index, columns = result.index, result.columns
    rewards = columns.reward if columns.scored is None else columns.reward.masked_fill(~columns.scored, 0.0)
    scores = rewards.to(torch.bfloat16).to(torch.float32)
    values = scores[index.first_row]
    differs = ~torch.isclose(scores, values[index.row_rollout], equal_nan=True)
    if bool(differs.any()):
        raise _disagreement(torch.nonzero(differs)[:, 0].tolist())
    # bfloat16 tensors are added up in float32; what is stored is rounded.
    exact = of_one_value(segment_moments(values, index.rollout_group, index.num_groups))
    moments = Moments(exact.count, _rounded(exact.mean), _rounded(exact.std))
    advantages = _rounded(values - moments.mean[index.rollout_group])
    if scale:
        advantages = _rounded(advantages / _rounded(moments.std + EPSILON)[index.rollout_group])
    return advantages[index.row_rollout]


def _rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float32)


def _disagreement(rows: list[int]) -> DisagreeingRewardsError:
    return DisagreeingRewardsError(
        f"reward of {format_rows(rows)}",
        got="another one than that of the first row of the rollout",
        expected="one reward on all rows of a rollout",
        reason="agent-lightning stops with a RuntimeError",
        remedy="assign the rollout's reward to all its rows",
        rows=rows,
    )
