"""Loss weights for trainers that take advantages and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.broadcast import rows_to_tokens
from miles_norm.errors import SampleError

__all__ = ["scale_advantages"]


def scale_advantages(advantages: Tensor, mask: Tensor | Sequence[Any], weights: Tensor) -> Tensor | list[Tensor]:
    r"""Put each row's weight into its advantage: ``[N]`` rows to tokens.

    .. math:: A'_{n,t} = w_n A_n m_{n,t}, \qquad \sum_{n,t} l(A'_{n,t}) = \sum_n w_n \sum_t m_{n,t} \, l(A_n)

    Valid for a loss that is homogeneous in the advantage, :math:`l(w A) = w \, l(A)` for :math:`w \ge 0` (the clipped
    loss with or without a second clip, GSPO, CISPO, REINFORCE), and that the trainer sums over tokens. Where it takes
    the mean over tokens instead, multiply the weights by the number of tokens that it divides by.

    KL and entropy terms do not contain the advantage and keep the trainer's own aggregation. Whitening the advantages
    afterwards destroys the weights: turn it off.

    Args:
        advantages: One per row ``[N]``.
        mask: Loss masks: one padded tensor ``[N, T]``, or N ragged lists, arrays or tensors.
        weights: Of ``loss_weights`` ``[N]``.

    Returns:
        Of the dtype of the advantages, float32 at least since weights are small: ``[N, T]``, or a list of N tensors.

    Raises:
        SampleError: another number of weights than rows, or masks that do not fit.

    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> scale_advantages(torch.tensor([1.0, -1.0]), mask, torch.tensor([0.25, 0.5])).tolist()
    [[0.25, 0.25], [-0.5, 0.0]]
    """
    if advantages.ndim != 1 or weights.shape != advantages.shape:
        raise SampleError(
            "weights",
            got=f"shape {list(weights.shape)} with advantages of shape {list(advantages.shape)}",
            expected="one advantage and one weight per row",
            reason="a weight belongs to a row",
            remedy="pass result.advantages and loss_weights(result, ...)",
        )
    return rows_to_tokens((advantages * weights).to(torch.promote_types(advantages.dtype, torch.float32)), mask)
