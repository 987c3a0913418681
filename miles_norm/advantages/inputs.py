"""What the hall hands to an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_norm.config import NormalizationConfig
from miles_norm.statistics import SegmentStatistics

__all__ = ["EstimatorInputs"]


@dataclass(frozen=True, eq=False)
class EstimatorInputs:
    """Rollouts and their groups; R rollouts, G groups."""

    rewards: Tensor
    """float64 ``[R]``; NaN where a rollout is unscored."""
    group: Tensor
    """int64 ``[R]``."""
    statistics: SegmentStatistics
    """Of the ``[G]`` groups, over their counted rollouts."""
    given_counted: Tensor | None
    """bool ``[R]``; None if every rollout counts."""
    members: Tensor | None
    """int64: the counted rollouts, group after group; None if these are all, as they stand."""
    row_tokens: Tensor
    """int64 ``[N]``: trainable tokens of each row."""
    row_rollout: Tensor
    """int64 ``[N]``."""
    components: Mapping[str, tuple[Tensor, SegmentStatistics]]
    """Per reward component float64 ``[R]``, NaN where a rollout lacks it, and its statistics per group."""
    config: NormalizationConfig

    @property
    def counted(self) -> Tensor:
        """bool ``[R]``."""
        if self.given_counted is not None:
            return self.given_counted
        return torch.ones(len(self.rewards), dtype=torch.bool, device=self.rewards.device)

    @property
    def tokens(self) -> Tensor:
        """int64 ``[R]``: trainable tokens of each rollout, over all its rows."""
        return self.row_tokens.new_zeros(len(self.rewards)).index_add_(0, self.row_rollout, self.row_tokens)
