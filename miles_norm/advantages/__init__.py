"""Advantage estimators: one small module each, and the registry that names them.

Every estimator is a pure function of rollout rewards, their groups and the group statistics. It gives the raw formula;
groups whose rewards are all equal, and groups of one, are set afterwards by one rule for all (``normalize_columns``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from miles_norm.advantages.dr_grpo import dr_grpo_advantages
from miles_norm.advantages.gdpo import gdpo_advantages
from miles_norm.advantages.grpo import grpo_advantages
from miles_norm.advantages.inputs import EstimatorInputs
from miles_norm.advantages.maxrl import maxrl_advantages
from miles_norm.advantages.opo import opo_advantages
from miles_norm.advantages.pass_at_k import analytic_pass_at_k_advantages, topk_gap_advantages
from miles_norm.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline_advantages
from miles_norm.advantages.rloo import rloo_advantages
from miles_norm.advantages.whitening import batch_moments, rescaled
from miles_norm.config import NormalizationConfig

__all__ = ["ESTIMATORS", "Estimator", "EstimatorInputs", "batch_moments", "rescaled"]


@dataclass(frozen=True)
class Estimator:
    """How the hall calls an estimator, and how it is written down: in symbols, and for one rollout in numbers."""

    compute: Callable[[EstimatorInputs], Tensor]
    definition: Callable[[NormalizationConfig], str]
    """The advantage in the symbols reward, mean, std and n of a prompt group, with the settings filled in."""
    formula: Callable[[NormalizationConfig], str]
    """The formula with ``{reward}``, ``{mean}``, ``{std}``, ``{epsilon}``, ``{n}``, ``{maximum}`` and ``{baseline}``
    left to fill in."""
    zero_where_equal: bool = True
    """Whether a group whose rewards are all equal gives 0; an estimator of components compares these instead."""


def _grpo(x: EstimatorInputs) -> Tensor:
    epsilon = x.config.std_epsilon if x.config.grpo_std_normalization else None
    return grpo_advantages(x.rewards, x.group, x.statistics, std_epsilon=epsilon)


def _grpo_formula(config: NormalizationConfig) -> str:
    return "({reward} - {mean}) / ({std} + {epsilon})" if config.grpo_std_normalization else "{reward} - {mean}"


def _grpo_definition(config: NormalizationConfig) -> str:
    return f"(reward - mean) / (std + {config.std_epsilon:g})" if config.grpo_std_normalization else "reward - mean"


def _opo(x: EstimatorInputs) -> Tensor:
    return opo_advantages(x.rewards, x.group, x.statistics, tokens=x.tokens, members=x.members)


def _maxrl(x: EstimatorInputs) -> Tensor:
    # The reward of a rollout that does not count may be anything.
    rewards = x.rewards if x.given_counted is None else x.rewards.masked_fill(~x.given_counted, torch.nan)
    return maxrl_advantages(rewards, x.group, x.statistics)


def _pass_at_k(x: EstimatorInputs) -> Tensor:
    options = x.config.options
    if options.pass_at_k == "analytic":
        return analytic_pass_at_k_advantages(x.rewards, x.group, x.statistics, x.counted, k=options.k or 1)
    return topk_gap_advantages(x.rewards, x.group, x.statistics, x.counted)


def _pass_at_k_definition(config: NormalizationConfig) -> str:
    k = config.options.k
    if config.options.pass_at_k == "analytic":
        return (
            f"(p_own - p) / sqrt(p * (1 - p)), where p is the share of all draws of {k} from the n rollouts that hold "
            "a right one, and p_own that of the draws with this rollout"
        )
    return "best reward - second best for the one best rollout, 0 for all others"


def _pass_at_k_formula(config: NormalizationConfig) -> str:
    if config.options.pass_at_k == "analytic":
        return (
            f"the advantage of reward {{reward}} over all draws of {config.options.k} from {{n}} rollouts "
            "with mean {mean}"
        )
    return "the lead over the second best if {reward} is the one best reward of the group ({maximum}), else 0"


def _gdpo(x: EstimatorInputs) -> Tensor:
    weights, ddof = x.config.options.component_weights, x.config.std_ddof
    return gdpo_advantages(x.components, weights, x.group, x.counted, ddof=ddof, std_epsilon=x.config.std_epsilon)


def _gdpo_terms(config: NormalizationConfig) -> str:
    return " + ".join(f"{weight:g} * z({name})" for name, weight in config.options.component_weights.items())


def _gdpo_definition(config: NormalizationConfig) -> str:
    epsilon = f"{config.std_epsilon:g}"
    return f"({_gdpo_terms(config)}) / (std over the batch + {epsilon}), where z = (reward - mean) / (std + {epsilon})"


def _gdpo_formula(config: NormalizationConfig) -> str:
    # A component may be named with braces, which the caller's format would fill in.
    terms = _gdpo_terms(config).replace("{", "{{").replace("}", "}}")
    return f"({terms}) / (std over the batch + {{epsilon}}) with z normalized over the group"


def _always(text: str) -> Callable[[NormalizationConfig], str]:
    return lambda _: text


_GRPO = Estimator(_grpo, _grpo_definition, _grpo_formula)

ESTIMATORS: Final = MappingProxyType(
    {
        "grpo": _GRPO,
        "gspo": _GRPO,
        "dr_grpo": Estimator(
            lambda x: dr_grpo_advantages(x.rewards, x.group, x.statistics),
            _always("reward - mean"),
            _always("{reward} - {mean}"),
        ),
        "rloo": Estimator(
            lambda x: rloo_advantages(x.rewards, x.group, x.statistics),
            _always("(reward - mean) * n / (n - 1)"),
            _always("({reward} - {mean}) * {n} / ({n} - 1)"),
        ),
        "opo": Estimator(
            _opo,
            _always("reward - (mean weighted by trainable tokens)"),
            _always("{reward} - {baseline} (the mean weighted by trainable tokens)"),
        ),
        "maxrl": Estimator(_maxrl, _always("(reward - mean) / mean"), _always("({reward} - {mean}) / {mean}")),
        "pass_at_k": Estimator(_pass_at_k, _pass_at_k_definition, _pass_at_k_formula),
        "gdpo": Estimator(_gdpo, _gdpo_definition, _gdpo_formula, zero_where_equal=False),
        "reinforce_plus_plus_baseline": Estimator(
            lambda x: reinforce_plus_plus_baseline_advantages(x.rewards, x.group, x.statistics),
            _always("reward - mean"),
            _always("{reward} - {mean}"),
        ),
    }
)
