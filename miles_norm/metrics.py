"""Flat metrics of a result for a training log, computed over rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_norm.counting import Exclusion

if TYPE_CHECKING:
    from miles_norm.result import NormalizedRewards

__all__ = ["result_metrics"]

PREFIX = "miles_norm/"


def result_metrics(result: NormalizedRewards) -> dict[str, float]:
    """Counts, reward statistics and shares of groups without a signal, as a flat dict under ``miles_norm/``.

    ``reward_mean`` and ``reward_std`` are over counted rollouts, ``row_reward_mean`` over scored rows: where the two
    means differ, a curve of row rewards is weighted by fan-out. A value without anything to compute it from is left
    out. Fan-out counts rows that are no padding.
    """
    index, statistics, columns = result.index, result.statistics, result.columns
    counted = result.counted_rollouts
    rewards = result.rollout_rewards[counted]
    rollout = index.row_rollout if columns.padding is None else index.row_rollout[~columns.padding]
    fan_out = torch.bincount(rollout, minlength=index.num_rollouts)
    fan_out = fan_out[fan_out > 0]
    own = result.rewards.row_values
    own = own[torch.isfinite(own)] if columns.padding is None else own[torch.isfinite(own) & ~columns.padding]
    several = statistics.count > 1
    values: dict[str, float] = {
        "rows": index.num_rows,
        "rollouts": index.num_rollouts,
        "groups": index.num_groups,
        "counted_rollouts": int(counted.sum()),
        "trained_rows": int(result.trained_rows.sum()),
        "trainable_tokens": int(result.trainable_tokens.sum()),
        "singleton_groups": int((statistics.count == 1).sum()),
        "zero_variance_groups": int((statistics.equal & several).sum()),
        "incomplete_groups": len(result.incomplete_groups),
        "warnings": len(result.warnings),
    }
    for reason in Exclusion:
        if reason in (Exclusion.COUNTED, Exclusion.PADDING):
            continue
        excluded = 0 if result.exclusion is None else int((result.exclusion == reason).sum())
        values[f"excluded_{reason.name.lower()}"] = excluded
    if len(fan_out):
        values |= {"fan_out_mean": float(fan_out.double().mean()), "fan_out_max": int(fan_out.max())}
    if len(own):
        values["row_reward_mean"] = float(own.mean())
    if len(rewards):
        advantages = result.rollout_advantages[counted]
        values |= {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std(correction=0)),
            "advantage_min": float(advantages.min()),
            "advantage_max": float(advantages.max()),
        }
    return {PREFIX + name: float(value) for name, value in values.items()}
