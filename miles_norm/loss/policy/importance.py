"""Correction for tokens that were sampled by an engine whose log-probs are not those of the trainer."""

from __future__ import annotations

import math

from torch import Tensor

from miles_norm.errors import ConfigError, shown
from miles_norm.loss.checks import is_number
from miles_norm.loss.tokens import extreme_metrics, log_ratio_of, mean_metrics, trained_values

__all__ = ["truncated_importance_sampling"]


def truncated_importance_sampling(
    token_losses: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.0, 2.0),
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Weigh each token loss by the ratio between trainer and rollout engine, cut off at both ends.

    .. math:: l' = \mathrm{sg}[\mathrm{clip}(\pi_\mathrm{old}(a) / \pi_\mathrm{rollout}(a), b_\mathrm{low},
        b_\mathrm{high})] \, l

    Source: Truncated Importance Sampling (Journal of Computational and Graphical Statistics 17, 2008). Why: kernels
    and precision of the rollout engine give other probabilities than the trainer's forward pass, so the samples are
    off policy before the first step. The cut bounds the variance, at the price of a bias.

    Args:
        token_losses: Of a policy loss, ``[N, T]`` or ``[T]``; carries the gradient.
        old_log_probs: The trainer's log-probs at the beginning of the batch.
        rollout_log_probs: The log-probs that the engine returned with the tokens.
        mask: 1 on trainable tokens.
        bounds: Smallest and largest weight; the largest may be ``math.inf``, for weights that are not cut off.

    Returns:
        Weighed token losses, and ``truncated_fraction``, ``importance_mean``, ``importance_min``, ``importance_max``
        (before the cut), ``mismatch_kl`` (mean of the engine's log-prob minus the trainer's), ``tokens``.

    Raises:
        ConfigError: no two bounds, or bounds that are negative or crossed.
        SampleError: tensors that differ in shape; on the CPU also values that no trainable token can have.

    >>> import torch
    >>> losses, _ = truncated_importance_sampling(
    ...     torch.ones(2), torch.tensor([3.0, 0.5]).log(), torch.zeros(2), torch.ones(2)
    ... )
    >>> losses.tolist()
    [2.0, 0.5]
    """
    low, high = _checked_bounds(bounds)
    losses, old, rollout = trained_values(
        mask, token_losses=token_losses, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs
    )
    log_ratio = log_ratio_of(old, rollout).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(low, high)
    means = {"truncated_fraction": weight != ratio, "importance_mean": ratio, "mismatch_kl": -log_ratio}
    return weight * losses, mean_metrics(mask, **means) | extreme_metrics(mask, "importance", ratio)


def _checked_bounds(bounds: object) -> tuple[float, float]:
    if isinstance(bounds, tuple | list) and len(bounds) == 2 and is_number(bounds[0], 0):
        low, high = bounds
        if is_number(high, low) or (isinstance(high, float) and high == math.inf):
            return float(low), float(high)
    raise ConfigError(
        "bounds",
        got=shown(bounds),
        expected="a smallest and a largest weight, the first not below 0, the second not below the first",
        reason="a weight below 0 would turn a loss around",
        remedy="pass for example bounds=(0.0, 2.0)",
    )
