"""Each row an observation of its prompt group."""

from __future__ import annotations

from torch import Tensor

from miles_norm.columns import RolloutColumns
from miles_norm.normalize import normalize_silently
from miles_norm.result import NormalizedRewards

__all__ = ["row_advantages"]


def row_advantages(result: NormalizedRewards) -> Tensor:
    """The same settings in the same prompt groups, with every row counted as a rollout of its own.

    This is what group-relative code does that knows of prompts and of rows but not of rollouts, for any estimator.
    Padding rows enter nothing, and keep their row's place with advantage 0.

    Returns:
        float32 ``[N]``.

    >>> from miles_norm import NormalizationConfig, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 4, rollout=[0, 0, 0, 1], reward=[0, 0, 0, 1], trainable_tokens=[1] * 4)
    >>> result = normalize_columns(columns, NormalizationConfig(advantage_estimator="dr_grpo"))
    >>> result.advantages.tolist(), row_advantages(result).tolist()
    ([-0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75])
    """
    columns = result.columns
    alone = RolloutColumns(
        group=result.index.row_group,
        rollout=None,
        reward=columns.reward,
        trainable_tokens=columns.trainable_tokens,
        scored=columns.scored,
        removed=columns.removed,
        truncated=columns.truncated,
        padding=columns.padding,
        components=columns.components,
    )
    return normalize_silently(alone, result.config).advantages
