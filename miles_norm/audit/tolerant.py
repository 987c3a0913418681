"""Normalize what normalization refuses: an audit has to look at the rows that a run would stop with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_norm.columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.errors import DisagreeingRewardsError, GroupingError, MilesNormError, MissingRewardError
from miles_norm.normalize import normalize_silently
from miles_norm.result import NormalizedRewards

__all__ = ["normalize_tolerantly"]


def normalize_tolerantly(
    columns: RolloutColumns, config: NormalizationConfig, prompt_group_sizes: Sequence[Any] | None = None
) -> tuple[NormalizedRewards, tuple[MilesNormError, ...]]:
    """``normalize_columns`` that relaxes a setting where its rule refuses rows, and returns what was refused.

    ============================================ ==============================
    unscored rows under ``missing_reward: error`` ``missing_reward: exclude``
    siblings that differ under ``shared``         ``rollout_reward: mainstream``
    ``prompt_group_sizes`` that do not fit        not used
    no groups under ``group_fallback: error``     ``group_fallback: single_group``
    a group of one under ``singleton: error``     ``singleton: zero``
    ============================================ ==============================

    ``result.config`` is the relaxed one.

    Raises:
        MilesNormError: anything else that normalization refuses.
    """
    refused: list[MilesNormError] = []
    while True:
        try:
            return normalize_silently(columns, config, prompt_group_sizes), tuple(refused)
        except MilesNormError as error:
            if isinstance(error, GroupingError) and error.subject == "prompt_group_sizes":
                prompt_group_sizes = None
            elif (relaxed := _relaxed(error, config)) != config:
                config = relaxed
            else:
                raise
            refused.append(error)


def _relaxed(error: MilesNormError, config: NormalizationConfig) -> NormalizationConfig:
    settings: dict[str, Any] = {}
    if isinstance(error, MissingRewardError):
        settings = {"missing_reward": "exclude"}
    elif isinstance(error, DisagreeingRewardsError):
        settings = {"rollout_reward": "mainstream", "shared_reward_tolerance": 0.0}
    elif isinstance(error, GroupingError):
        settings = {"group_fallback": "single_group"} if error.subject == "prompt groups" else {"singleton": "zero"}
    return NormalizationConfig(**{**dict(config), **settings})
