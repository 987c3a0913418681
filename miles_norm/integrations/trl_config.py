"""What TRL's arguments say of advantages and the loss, and what of it cannot go with rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.config import PASS_THROUGH_ESTIMATORS, EstimatorOptions, NormalizationConfig
from miles_norm.errors import ConfigError

__all__ = ["check_loss_type", "divided_by", "normalization_settings"]

_SCALED = ("grpo", "gspo")
"""Estimators that read ``scale_rewards``."""


def normalization_settings(
    args: Any, config: NormalizationConfig | None, functions: Sequence[str], weights: Sequence[float]
) -> NormalizationConfig:
    """The settings of advantages: ``config``, which may not contradict TRL's arguments, or what these say.

    Args:
        args: A ``GRPOConfig``: scale_rewards, multi_objective_aggregation.
        config: None for GRPO as the arguments have it, or GDPO with ``normalize_then_sum``.
        functions: Names of the reward functions.
        weights: Their weights.

    Raises:
        ConfigError: ``scale_rewards="batch"``; an argument that says otherwise than ``config``; an estimator that
            leaves the rewards to the trainer.
    """
    by_component = args.multi_objective_aggregation == "normalize_then_sum"
    scaling = args.scale_rewards
    if scaling == "batch" and not by_component:
        raise ConfigError(
            "scale_rewards",
            got="'batch'",
            expected="'group' or 'none'",
            reason="TRL takes the deviation of the batch over rows",
            remedy="set scale_rewards='none', and whitening='rollout' in the options of a NormalizationConfig",
        )
    if config is None:
        if not by_component:
            return NormalizationConfig(grpo_std_normalization=scaling == "group")
        options = EstimatorOptions(gdpo_components=tuple(functions), gdpo_weights=tuple(weights))
        return NormalizationConfig(advantage_estimator="gdpo", options=options)
    _refuse_contradictions(args, config, dict(zip(functions, weights, strict=True)))
    return config


def _refuse_contradictions(args: Any, config: NormalizationConfig, weights: dict[str, float]) -> None:
    estimator, std = config.advantage_estimator, config.grpo_std_normalization
    scaling = "group" if std else "none"
    summed = args.multi_objective_aggregation
    checks = [
        (
            estimator in PASS_THROUGH_ESTIMATORS,
            f"advantage_estimator={estimator!r}",
            "TRL has no critic, and computes nothing from rewards that are passed through",
            "choose an estimator with a baseline, or rewards_normalization=False for REINFORCE",
        ),
        (
            estimator in _SCALED and config.rewards_normalization and args.scale_rewards != scaling,
            f"grpo_std_normalization={std} with scale_rewards={args.scale_rewards!r}",
            "both say whether advantages are divided by the deviation of the group",
            f"set scale_rewards={scaling!r}",
        ),
        (
            (summed == "normalize_then_sum") != (estimator == "gdpo"),
            f"advantage_estimator={estimator!r} with multi_objective_aggregation={summed!r}",
            "'normalize_then_sum' is what gdpo does, and no other estimator",
            "set both or neither",
        ),
        (
            estimator == "gdpo" and config.options.component_weights != weights,
            f"components {config.options.component_weights} with reward functions {weights}",
            "every reward function is a component",
            "leave the NormalizationConfig away, or name the functions and the weights of reward_weights",
        ),
    ]
    for contradicts, got, reason, remedy in checks:
        if contradicts:
            subject = "normalization_config and TRL's arguments"
            raise ConfigError(subject, got=got, expected="settings that agree", reason=reason, remedy=remedy)


def check_loss_type(name: str) -> None:
    """Refuse a loss whose divisor is not known when advantages are computed.

    Raises:
        ConfigError: ``bnpo``, or a loss that TRL 1.16 does not have.
    """
    divided_by(name, torch.ones(1, dtype=torch.int64), 1)


def divided_by(loss_type: str, tokens: Tensor, max_completion_length: int) -> Tensor:
    r"""What TRL divides the token losses of each row by, over the rows of a generation batch.

    With N rows of :math:`L_n` trainable tokens:

    =================== ===================================
    dapo, cispo, vespo  :math:`\sum_n L_n`
    grpo, sapo          :math:`N L_n`
    luspo               N
    dr_grpo             N max_completion_length
    =================== ===================================

    ``bnpo`` divides by the tokens of a micro-batch, and rows are shuffled into micro-batches afterwards.

    Args:
        loss_type: TRL's.
        tokens: Trainable tokens of the rows of all processes, int64 ``[N]``.
        max_completion_length: TRL's.

    Returns:
        float64 ``[N]`` or ``[1]``.

    Raises:
        ConfigError: ``bnpo``, or an unknown loss.

    >>> divided_by("grpo", torch.tensor([3, 1]), 8).tolist(), divided_by("dr_grpo", torch.tensor([3, 1]), 8).tolist()
    ([6.0, 2.0], [16.0])
    """
    lengths, rows = tokens.to(torch.float64), tokens.new_full((1,), len(tokens), dtype=torch.float64)
    match loss_type:
        case "dapo" | "cispo" | "vespo":
            return lengths.sum(dim=0, keepdim=True).clamp(min=1)
        case "grpo" | "sapo":
            return rows * lengths
        case "luspo":
            return rows
        case "dr_grpo":
            return rows * max_completion_length
    raise ConfigError(
        "loss_type",
        got=repr(loss_type),
        expected="dapo, cispo, vespo, grpo, sapo, luspo or dr_grpo",
        reason="advantages carry the loss weights times what TRL divides by, and that has to be known with the batch",
        remedy="instead of bnpo set loss_type='dapo': with the weights of a LossConfig all of them are the same mean",
    )
