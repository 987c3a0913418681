"""What the frameworks' rules share: which steps a config asks for, and moments of segments in their precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.config import NormalizationConfig
from miles_norm.errors import ConfigError, MissingRewardError, format_rows
from miles_norm.result import NormalizedRewards

__all__ = ["EPSILON", "Moments", "asks_for_scale", "given_rewards", "segment_moments"]

EPSILON = 1e-6
"""What all of them add to the standard deviation."""

_CENTRED = ("grpo", "gspo", "dr_grpo")


@dataclass(frozen=True, eq=False)
class Moments:
    """Of each segment: int64, then two of the precision of the values, ``[S]``."""

    count: Tensor
    mean: Tensor
    std: Tensor
    """With n - 1; NaN for a segment of one value."""


def segment_moments(values: Tensor, segment: Tensor, segments: int) -> Moments:
    """Two-pass moments of segments in the precision of ``values``.

    In float32 the mean of seven rewards of 0.7 is not 0.7: what is left, divided by a deviation of nearly nothing, is a
    part of what the frameworks compute.
    """
    count = torch.bincount(segment, minlength=segments)
    mean = values.new_zeros(segments).index_add_(0, segment, values) / count
    squares = values.new_zeros(segments).index_add_(0, segment, (values - mean[segment]).square())
    return Moments(count, mean, (squares / (count - 1)).sqrt())


def asks_for_scale(config: NormalizationConfig, name: str, *also: str, passes: bool = True) -> bool | None:
    """Whether rewards are divided by a deviation after the mean was subtracted; None if they pass through.

    ``also`` are further estimators that subtract the mean; ``passes`` says whether rewards may pass through at all.

    Raises:
        ConfigError: an estimator or a step that the framework does not have.
    """
    estimator, whitening = config.advantage_estimator, config.options.whitening
    if passes and not config.normalizes_groups:
        return None
    if estimator in (*_CENTRED, *also) and config.normalizes_groups and whitening == "none":
        return estimator in ("grpo", "gspo") and config.grpo_std_normalization
    given = estimator if config.rewards_normalization else f"{estimator} with rewards_normalization=False"
    raise ConfigError(
        f"baseline {name!r}",
        got=f"advantage_estimator {given}" + (f", options.whitening={whitening}" if whitening != "none" else ""),
        expected=f"one of {', '.join((*_CENTRED, *also))}, without whitening",
        reason=f"{name} computes nothing else before its trainer",
        remedy="take the baseline 'rows', which counts rows under any settings, or compare under another estimator",
    )


def given_rewards(result: NormalizedRewards, name: str) -> Tensor:
    """float64 ``[N]``: rewards as they came, NaN and infinities too.

    Raises:
        MissingRewardError: a reward of None, with which the framework stops.
    """
    columns = result.columns
    if columns.scored is not None and not bool(columns.scored.all()):
        rows = torch.nonzero(~columns.scored)[:, 0].tolist()
        raise MissingRewardError(
            f"reward of {format_rows(rows)}",
            got="None",
            expected="a number on every row",
            reason=f"{name} makes a tensor of all rewards, and stops with a TypeError",
            remedy="score the rows",
            rows=rows,
        )
    return columns.reward
