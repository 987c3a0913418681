"""Distance from a reference policy, one term per token."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from miles_norm.errors import ConfigError, shown
from miles_norm.loss.tokens import log_ratio_of, mean_metrics, trained_values

__all__ = ["kl_loss"]


def kl_loss(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, kind: Literal["k1", "k2", "k3"] = "k3"
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Estimate of the KL divergence of the policy from the reference, from the sampled tokens alone.

    With :math:`d = \ln \pi(a) - \ln \pi_\mathrm{ref}(a)`:

    == ======================= ============================================================================
    k1 :math:`d`               unbiased value; as a loss its gradient is :math:`\nabla \ln \pi(a)`, zero in expectation
    k2 :math:`d^2 / 2`         biased value; on policy its gradient is that of the divergence, in expectation
    k3 :math:`e^{-d} - 1 + d`  unbiased value, never negative; on policy its gradient is that of the opposite divergence
    == ======================= ============================================================================

    Source: Approximating KL Divergence (joschu.net/blog/kl-approx.html); k3 as a loss, GRPO (arXiv:2402.03300).

    Args:
        log_probs: Of the policy that is trained, ``[N, T]`` or ``[T]``; carries the gradient.
        reference_log_probs: Of the reference policy.
        mask: 1 on trainable tokens.
        kind: Which estimate.

    Returns:
        Token losses, to be multiplied by the coefficient and added to the policy loss before both are reduced, and
        ``kl``, ``tokens``.

    Raises:
        ConfigError: another kind.
        SampleError: tensors that differ in shape; on the CPU also values that no trainable token can have.

    >>> import torch
    >>> for kind in ("k1", "k2", "k3"):  # d = ln 2
    ...     losses, _ = kl_loss(torch.tensor([2.0]).log(), torch.zeros(1), torch.ones(1), kind=kind)
    ...     print(kind, round(float(losses[0]), 4))
    k1 0.6931
    k2 0.2402
    k3 0.1931
    """
    if not isinstance(kind, str) or kind not in ("k1", "k2", "k3"):
        raise ConfigError(
            "kind of KL estimate",
            got=shown(kind),
            expected="k1, k2 or k3",
            reason="each is another estimate of the divergence",
            remedy="choose k3 for a term that is never negative, k2 for the gradient of the divergence",
        )
    policy, reference = trained_values(mask, log_probs=log_probs, reference_log_probs=reference_log_probs)
    distance = policy - reference
    if kind == "k1":
        losses = distance
    elif kind == "k2":
        losses = distance.square() / 2
    else:
        losses = log_ratio_of(reference, policy).exp() - 1 + distance
    return losses, mean_metrics(mask, kl=losses)
