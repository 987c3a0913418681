"""Miles: one reward per rollout, with the mainstream rule of pull request 2369 and without it."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.audit.baselines.moments import EPSILON, asks_for_scale, given_rewards, segment_moments
from miles_norm.errors import DisagreeingRewardsError, format_rows
from miles_norm.result import NormalizedRewards
from miles_norm.runs import NumberedRuns, number_rows

__all__ = ["miles_2369_advantages", "miles_2498_advantages"]

_GIVEN = ("prompt_group_sizes", "nesting")


def miles_2369_advantages(result: NormalizedRewards) -> Tensor:
    """The sibling with the most trainable tokens speaks for its rollout, the first one on a tie.

    Groups come from recorded sizes, else from the group id alone: without sizes, prompts of several adapters with one
    id are one group. The rollouts of a group are normalized in float32: the mean is subtracted and, for ``grpo`` and
    ``gspo`` in a group of more than one rollout whose deviation is above 0, divided by std + 1e-6. A reward of NaN
    spreads to its group.

    Source: Miles with pull request 2369 (63d2190ae).

    Returns:
        float32 ``[N]``.

    Raises:
        ConfigError: an estimator that Miles lacks.
        MissingRewardError: a reward of None.
    """
    name = "miles-2369"
    scale = asks_for_scale(result.config, name, "reinforce_plus_plus_baseline")
    rewards = given_rewards(result, name)
    if scale is None:
        return rewards.to(torch.float32)
    runs = _rollouts(result)
    tokens = result.columns.trainable_tokens
    if result.columns.removed is not None:
        tokens = tokens.masked_fill(result.columns.removed, 0)
    rows = len(rewards)
    # The largest pair of tokens and distance from the end is the first longest row.
    key = tokens * rows + torch.arange(rows - 1, -1, -1, device=tokens.device)
    best = key.new_zeros(len(runs.first_row)).scatter_reduce_(0, runs.row_run, key, "amax", include_self=False)
    return _normalized(rewards[rows - 1 - best % rows], runs, scale)


def miles_2498_advantages(result: NormalizedRewards) -> Tensor:
    """As ``miles_2369_advantages``, but all rows of a rollout must have one reward.

    Source: Miles after pull request 2498 (31f1ca961).

    Raises:
        DisagreeingRewardsError: siblings with different rewards, with which Miles stops; all are named.
        ConfigError: an estimator that Miles lacks.
        MissingRewardError: a reward of None.
    """
    name = "miles-2498"
    scale = asks_for_scale(result.config, name, "reinforce_plus_plus_baseline")
    rewards = given_rewards(result, name)
    if scale is None:
        return rewards.to(torch.float32)
    runs = _rollouts(result)
    first = rewards[runs.first_row]
    # A row is compared with the first one only: a reward of NaN alone equals nothing and disagrees with nobody.
    others = torch.arange(len(rewards), device=rewards.device) != runs.first_row[runs.row_run]
    differs = others & (rewards != first[runs.row_run])
    if bool(differs.any()):
        raise _disagreement(result, runs, torch.unique(runs.row_run[differs]))
    return _normalized(first, runs, scale)


def _rollouts(result: NormalizedRewards) -> NumberedRuns:
    """Rollouts as Miles keys them: adapters are not a part of the group id."""
    index, columns = result.index, result.columns
    # A guess is made by the same rules as ours, and recorded sizes are taken by both.
    by_id = columns.group is not None and columns.group.missing is None and index.group_source not in _GIVEN
    group = columns.group.codes if by_id and columns.group is not None else index.row_group
    return number_rows(group, None if columns.rollout is None else columns.rollout.codes, None)


def _normalized(values: Tensor, runs: NumberedRuns, scale: bool) -> Tensor:
    values = values.to(torch.float32)
    moments = segment_moments(values, runs.run_group, runs.num_groups)
    advantages = values - moments.mean[runs.run_group]
    if scale:
        scaled = advantages / (moments.std[runs.run_group] + EPSILON)
        advantages = torch.where((moments.std > 0)[runs.run_group], scaled, advantages)
    return advantages[runs.row_run]


def _disagreement(result: NormalizedRewards, runs: NumberedRuns, rollouts: Tensor) -> DisagreeingRewardsError:
    rows = torch.nonzero(torch.isin(runs.row_run, rollouts))[:, 0].tolist()
    column = result.columns.rollout
    ids = [] if column is None else column.labels_at(runs.first_row[rollouts])
    return DisagreeingRewardsError(
        f"siblings of {format_rows(ids, 'rollout')}",
        got=", ".join(f"row {row}: {float(result.columns.reward[row]):g}" for row in rows[:10])
        + ("; ..." if len(rows) > 10 else ""),
        expected="one reward on all rows of a rollout",
        reason="miles-2498 stops with a ValueError",
        remedy="assign the rollout's reward to all its rows, or compare with miles-2369, where one sibling speaks",
        rows=rows,
    )
