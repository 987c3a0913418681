"""Advantage estimators: one small module each, and the registry that names them.

Every estimator is a pure function of rollout rewards, their groups and the group statistics. It gives the raw formula;
groups whose rewards are all equal, and groups of one, are set afterwards by one rule for all (``normalize_columns``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from miles_norm.advantages.dr_grpo import dr_grpo_advantages
from miles_norm.advantages.grpo import grpo_advantages
from miles_norm.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline_advantages
from miles_norm.advantages.rloo import rloo_advantages
from miles_norm.config import NormalizationConfig
from miles_norm.statistics import SegmentStatistics

__all__ = ["ESTIMATORS", "Estimator"]


@dataclass(frozen=True)
class Estimator:
    """How the hall calls an estimator, and how its arithmetic is written down for one rollout."""

    compute: Callable[[Tensor, Tensor, SegmentStatistics, NormalizationConfig], Tensor]
    formula: Callable[[NormalizationConfig], str]
    """The formula with ``{reward}``, ``{mean}``, ``{std}``, ``{epsilon}`` and ``{n}`` left to fill in."""


def _grpo(rewards: Tensor, group: Tensor, statistics: SegmentStatistics, config: NormalizationConfig) -> Tensor:
    epsilon = config.std_epsilon if config.grpo_std_normalization else None
    return grpo_advantages(rewards, group, statistics, std_epsilon=epsilon)


def _grpo_formula(config: NormalizationConfig) -> str:
    return "({reward} - {mean}) / ({std} + {epsilon})" if config.grpo_std_normalization else "{reward} - {mean}"


def _centred(config: NormalizationConfig) -> str:
    return "{reward} - {mean}"


_GRPO = Estimator(_grpo, _grpo_formula)

ESTIMATORS: Final = MappingProxyType(
    {
        "grpo": _GRPO,
        "gspo": _GRPO,
        "dr_grpo": Estimator(lambda r, g, s, _: dr_grpo_advantages(r, g, s), _centred),
        "rloo": Estimator(
            lambda r, g, s, _: rloo_advantages(r, g, s), lambda _: "({reward} - {mean}) * {n} / ({n} - 1)"
        ),
        "reinforce_plus_plus_baseline": Estimator(
            lambda r, g, s, _: reinforce_plus_plus_baseline_advantages(r, g, s), _centred
        ),
    }
)
