"""Loss weights for trainers that take advantages and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.broadcast import rows_to_tokens
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss.checks import NUMBERS, described, is_dense

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
        A row that is masked as a whole is 0, whatever its advantage and weight.

    Raises:
        SampleError: another number of weights than rows, masks that do not fit; a trained row whose advantage or weight
            is NaN or infinite, or whose weight is below 0, all named.

    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> scale_advantages(torch.tensor([1.0, -1.0]), mask, torch.tensor([0.25, 0.5])).tolist()
    [[0.25, 0.25], [-0.5, 0.0]]
    """
    pair = (advantages, weights)
    columns = all(is_dense(tensor) and tensor.ndim == 1 and tensor.dtype in NUMBERS for tensor in pair)
    if not columns or len(weights) != len(advantages):
        raise _wrong_pair("weights", f"{described(weights)}, with advantages {described(advantages)}")
    weights = weights.to(advantages.device)
    usable = torch.isfinite(advantages) & torch.isfinite(weights) & (weights >= 0)
    # A product beyond the dtype is infinite although its factors are not.
    usable &= torch.isfinite(advantages * weights)
    # Both factors are replaced, so that neither the product nor its gradient is NaN where everything is masked.
    product = advantages.masked_fill(~usable, 0) * weights.masked_fill(~usable, 0)
    scaled = rows_to_tokens(product.to(torch.promote_types(advantages.dtype, torch.float32)), mask)
    unusable = [] if bool(usable.all()) else rows_to_tokens((~usable).to(torch.float32), mask)
    bad = [row for row, tokens in enumerate(unusable) if bool(tokens.any())]
    if bad:
        got = (f"row {row}: advantage {advantages[row]:g}, weight {weights[row]:g}" for row in bad[:10])
        raise _wrong_pair(f"advantages and weights of {format_rows(bad)}", "; ".join(got), bad)
    return scaled


def _wrong_pair(subject: str, got: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="one finite advantage and one finite weight from 0 on for each row [N] that has a trainable token",
        reason="a weight belongs to a row, and a row trains with the product of the two",
        remedy="pass result.advantages and loss_weights(result, ...)",
        rows=rows,
    )
