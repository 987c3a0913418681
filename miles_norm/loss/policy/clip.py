"""The clipped loss of PPO and GRPO, with bounds of their own on both sides and a second clip."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.errors import ConfigError, shown
from miles_norm.loss.checks import is_number, number_pair
from miles_norm.loss.tokens import extreme_metrics, log_ratio_of, mean_metrics, trained_values

__all__ = ["checked_clip", "clipped_loss", "pessimistic"]


def clipped_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Loss of each token, pessimistic between the ratio and the clipped ratio.

    .. math::
        l = -\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon_\mathrm{low}, 1 + \epsilon_\mathrm{high}) A), \qquad
        \rho = \pi(a) / \pi_\mathrm{old}(a)

    With ``dual_clip`` c, :math:`l` is at most :math:`-c A` where :math:`A < 0`.

    Source: PPO (arXiv:1707.06347); bounds of their own, DAPO (arXiv:2503.14476); dual clip (arXiv:1912.09729). Why a
    second clip: where the advantage is negative the first one leaves the loss unbounded in the ratio.

    Args:
        log_probs: Of the policy that is trained, ``[N, T]`` or ``[T]``; carries the gradient.
        old_log_probs: Of the policy at the beginning of the batch.
        advantages: One per token, or ``[N, 1]``.
        mask: 1 on trainable tokens.
        clip: How far the ratio may go below and above 1.
        dual_clip: Above 1; None for no second clip.

    Returns:
        Token losses, and ``clip_fraction``, ``dual_clip_fraction``, ``kl`` (mean of :math:`-\ln\rho`), ``ratio_min``,
        ``ratio_max``, ``tokens``.

    Raises:
        ConfigError: no two finite bounds from 0 on, or a second clip that is no finite number above 1.
        SampleError: tensors that differ in shape; on the CPU also values that no trainable token can have.

    >>> log_probs = torch.tensor([1.5, 1.5, 0.5]).log()
    >>> losses, metrics = clipped_loss(log_probs, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), torch.ones(3))
    >>> [round(loss, 3) for loss in losses.tolist()], round(float(metrics["clip_fraction"]), 3)
    ([-1.2, 1.5, -0.5], 0.333)
    """
    clip = checked_clip(clip)
    if dual_clip is not None and not (is_number(dual_clip, 1) and dual_clip > 1):
        expected = "a finite number above 1, or None for no second clip"
        raise _wrong_bound("dual_clip", dual_clip, expected, "at 1 it would undo the first clip")
    policy, old, advantage = trained_values(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    log_ratio = log_ratio_of(policy, old)
    ratio = log_ratio.exp()
    losses, was_clipped = pessimistic(ratio, advantage, clip)
    bounded = torch.zeros_like(was_clipped)
    if dual_clip is not None:
        bound = -float(dual_clip) * advantage
        bounded = (advantage < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
    means = {"clip_fraction": was_clipped, "dual_clip_fraction": bounded, "kl": -log_ratio}
    return losses, mean_metrics(mask, **means) | extreme_metrics(mask, "ratio", ratio)


def pessimistic(ratio: Tensor, advantage: Tensor, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The larger loss of the ratio and of the clipped ratio, and where the clip decided."""
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - clip[0], 1 + clip[1])
    was_clipped = clipped > plain
    return torch.where(was_clipped, clipped, plain), was_clipped


def checked_clip(clip: object) -> tuple[float, float]:
    """Two distances from 1, below and above.

    Raises:
        ConfigError: anything but two finite numbers from 0 on.
    """
    bounds = number_pair(clip, low=0)
    if bounds is None:
        expected = "two finite distances from 1, below and above, none below 0"
        raise _wrong_bound("clip", clip, expected, "the unchanged policy has the ratio 1")
    return bounds


def _wrong_bound(name: str, got: object, expected: str, reason: str) -> ConfigError:
    remedy = "pass for example clip=(0.2, 0.28), or dual_clip=3.0; ratios end at e^20, so 1e9 above 1 is no bound"
    return ConfigError(name, got=shown(got), expected=expected, reason=reason, remedy=remedy)
