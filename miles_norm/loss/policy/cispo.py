"""The loss of CISPO: the clipped ratio weighs the log-prob and carries no gradient."""

from __future__ import annotations

from torch import Tensor

from miles_norm.loss.policy.clip import checked_clip
from miles_norm.loss.tokens import extreme_metrics, log_ratio_of, mean_metrics, trained_values

__all__ = ["cispo_loss"]


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip: tuple[float, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""REINFORCE, each token weighed by its clipped ratio.

    .. math::
        l = -\mathrm{sg}[\mathrm{clip}(\rho, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high})] \, A \ln \pi(a)

    Source: MiniMax-M1 (arXiv:2506.13585). Why: a token beyond the bounds keeps a gradient, where the clipped loss has
    none.

    Args:
        log_probs: Of the policy that is trained, ``[N, T]`` or ``[T]``; carries the gradient.
        old_log_probs: Of the policy at the beginning of the batch.
        advantages: One per token, or ``[N, 1]``.
        mask: 1 on trainable tokens.
        clip: How far the ratio may go below and above 1; a ratio is positive, so 1 below means no lower bound.

    Returns:
        Token losses, and ``clip_fraction``, ``kl``, ``ratio_min``, ``ratio_max`` (before the clip), ``tokens``.

    Raises:
        ConfigError: no two finite bounds from 0 on.
        SampleError: tensors that differ in shape; on the CPU also values that no trainable token can have.

    >>> import torch
    >>> log_probs = torch.tensor([2.0]).log()
    >>> losses, _ = cispo_loss(log_probs, torch.zeros(1), torch.ones(1), torch.ones(1), clip=(1.0, 0.5))
    >>> round(float(losses[0]), 4)  # -1.5 ln 2
    -1.0397
    """
    clip = checked_clip(clip)
    policy, old, advantage = trained_values(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    log_ratio = log_ratio_of(policy, old).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip[0], 1 + clip[1])
    means = {"clip_fraction": weight != ratio, "kl": -log_ratio}
    return -weight * advantage * policy, mean_metrics(mask, **means) | extreme_metrics(mask, "ratio", ratio)
