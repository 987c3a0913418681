"""One advantage per rollout: an estimator's formula, then the rules that hold for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from miles_norm.advantages import ESTIMATORS, EstimatorInputs, batch_moments, rescaled
from miles_norm.config import NormalizationConfig
from miles_norm.counting import GroupedRewards
from miles_norm.errors import GroupingError, RewardError, format_rows
from miles_norm.grouping import RolloutIndex
from miles_norm.rewards import RolloutRewards

__all__ = ["rollout_advantages"]

Moments = tuple[float, float] | None
"""Mean and deviation over the batch."""


def rollout_advantages(
    rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig
) -> tuple[Tensor, Moments]:
    """float32 ``[R]``: the estimator's formula, then the rules that hold for all of them; and what whitening took."""
    statistics = grouped.statistics
    moments: Moments = None
    if not config.normalizes_groups:
        advantages = rewards.values
    else:
        if config.singleton == "error" and bool((statistics.count == 1).any()):
            raise _singletons(grouped, torch.nonzero(statistics.count == 1)[:, 0].tolist())
        advantages, moments = _estimate(rewards, grouped, config)
    counted = grouped.counted
    if counted is not None:
        advantages = advantages.masked_fill(~counted, 0.0)
    narrow = advantages.to(torch.float32)
    if not math.isfinite(float(narrow.sum())) and not bool((finite := torch.isfinite(narrow)).all()):
        raise _too_large(advantages, ~finite, grouped.index)
    return narrow, moments


def _estimate(rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig) -> tuple[Tensor, Moments]:
    """float64 ``[R]``: the group stage, and whitening over the batch where it is asked for."""
    index, statistics = grouped.index, grouped.statistics
    estimator = ESTIMATORS[config.advantage_estimator]
    inputs = _inputs(rewards, grouped, config)
    try:
        advantages = estimator.compute(inputs)
    except (RewardError, GroupingError) as error:
        raise _with_ids(error, index) from None
    if estimator.zero_where_equal:
        advantages = advantages.masked_fill(statistics.equal.index_select(0, index.rollout_group), 0.0)
    if config.singleton == "raw":
        advantages = torch.where((statistics.count == 1)[index.rollout_group], rewards.values, advantages)
    options = config.options
    if options.whitening == "none":
        return advantages, None
    tokens = inputs.tokens if options.whitening == "token" else None
    moments = batch_moments(advantages, inputs.counted, tokens=tokens, ddof=config.std_ddof)
    if moments is None:
        return advantages, None
    scaled = rescaled(advantages, moments, shift=options.whitening_shift, std_epsilon=config.std_epsilon)
    return scaled, moments


def _inputs(rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig) -> EstimatorInputs:
    return EstimatorInputs(
        rewards=rewards.values,
        group=grouped.index.rollout_group,
        statistics=grouped.statistics,
        members=grouped.members,
        row_tokens=rewards.row_tokens,
        row_rollout=grouped.index.row_rollout,
        given_counted=grouped.counted,
        components=grouped.components,
        config=config,
    )


def _with_ids(error: RewardError | GroupingError, index: RolloutIndex) -> RewardError | GroupingError:
    """An estimator numbers rollouts and groups; users know them by their ids and rows."""
    numbers = error.rows
    if isinstance(error, RewardError):
        mask = torch.zeros(index.num_rollouts, dtype=torch.bool, device=index.row_rollout.device)
        mask[list(numbers)] = True
        rows = torch.nonzero(mask[index.row_rollout])[:, 0].tolist()
        ids = [index.rollout_ids[number] for number in numbers]
        subject = f"reward of {format_rows(rows)} ({format_rows(ids, 'rollout')})"
    else:
        rows = _rows_of_groups(index, numbers)
        subject = format_rows([index.group_ids[number] for number in numbers], "prompt group")
    return type(error)(
        subject, got=error.got, expected=error.expected, reason=error.reason, remedy=error.remedy, rows=rows
    )


def _too_large(advantages: Tensor, rollouts: Tensor, index: RolloutIndex) -> RewardError:
    """Rewards that fit float32 while their distance from the baseline, or their sum, does not."""
    rows = torch.nonzero(rollouts[index.row_rollout])[:, 0].tolist()
    return RewardError(
        f"advantage of {format_rows(rows)}",
        got=", ".join(f"{value:g}" for value in advantages[rollouts][:10].tolist()),
        expected=f"a magnitude of at most {torch.finfo(torch.float32).max:.6g}",
        reason="advantages are float32 and would become infinite",
        remedy="rescale the rewards",
        rows=rows,
    )


def _singletons(grouped: GroupedRewards, groups: list[int]) -> GroupingError:
    ids = grouped.index.group_ids
    return GroupingError(
        format_rows([ids[group] for group in groups], "prompt group"),
        got="one counted rollout each",
        expected="at least two (singleton is 'error')",
        reason="a lone rollout has nothing to be compared with",
        remedy="sample more rollouts per prompt, or set singleton to 'zero' or 'raw'",
        rows=_rows_of_groups(grouped.index, groups),
    )


def _rows_of_groups(index: RolloutIndex, groups: Sequence[int]) -> list[int]:
    numbers = torch.tensor(list(groups), device=index.row_rollout.device)
    rows: list[int] = torch.nonzero(torch.isin(index.row_group, numbers))[:, 0].tolist()
    return rows
