"""What the policy losses share: token layouts, ratios that cannot overflow, metrics without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.errors import SampleError

__all__ = ["extreme_metrics", "log_ratio_of", "mean_metrics", "row_of_tokens", "spread_rows", "trained_values"]

LIMIT = 20.0
"""Log-ratios beyond this are cut off: e^20 is 4.9e8, and an exponential that overflows makes every gradient NaN."""


def row_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The row of each token of a packed sequence: int64 ``[T]``.

    Args:
        cu_seqlens: Where each row begins, and where the last one ends ``[N + 1]``.
        num_tokens: T, so that the length is known without asking the device.

    >>> row_of_tokens(torch.tensor([0, 2, 2, 5]), 5).tolist()
    [0, 0, 2, 2, 2]
    """
    lengths = cu_seqlens.diff().to(torch.int64)
    rows = torch.arange(len(lengths), device=cu_seqlens.device)
    return torch.repeat_interleave(rows, lengths, output_size=num_tokens)


def spread_rows(values: Tensor, tokens: Tensor, rows: Tensor | None) -> Tensor:
    """Values of rows ``[N]`` in a shape that meets their tokens: ``[N, 1]`` for padded, ``[T]`` for packed ones.

    Raises:
        SampleError: the tokens are not ``[N, T]`` and no row index is given, or the index does not fit them.
    """
    if rows is None:
        if tokens.ndim != 2 or len(tokens) != len(values):
            raise _wrong_shape("row values", values, f"one value for each row of tokens of shape {list(tokens.shape)}")
        return values[:, None]
    if tokens.ndim != 1 or rows.shape != tokens.shape:
        raise _wrong_shape("row index", rows, f"the row of each packed token, with tokens of {list(tokens.shape)}")
    return values[rows]


def trained_values(log_probs: Tensor, mask: Tensor, **others: Tensor) -> list[Tensor]:
    """Every tensor with 0 where the mask is 0, in float32 at least, so that masked entries may hold anything.

    Raises:
        SampleError: a tensor that is not shaped as the log-probs. ``advantages`` may also be ``[N, 1]``.
    """
    if mask.shape != log_probs.shape:
        raise _wrong_shape("mask", mask, f"the shape of the log-probs, {list(log_probs.shape)}")
    per_row = (len(log_probs), 1) if log_probs.ndim == 2 else None
    for name, tensor in others.items():
        if tensor.shape != log_probs.shape and not (name == "advantages" and tuple(tensor.shape) == per_row):
            raise _wrong_shape(name, tensor, f"the shape of the log-probs, {list(log_probs.shape)}")
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    keep = mask != 0
    return [torch.where(keep, tensor.to(dtype), 0.0) for tensor in (log_probs, *others.values())]


def log_ratio_of(log_probs: Tensor, others: Tensor) -> Tensor:
    """Difference of log-probs, cut off at ``LIMIT``; beyond it there is no gradient."""
    return (log_probs - others).clamp(-LIMIT, LIMIT)


def mean_metrics(mask: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """Means over the trainable tokens, and their number, so that means of micro-batches can be combined."""
    keep = mask != 0
    tokens = keep.sum()
    some = tokens.clamp(min=1)
    means = {name: torch.where(keep, value.detach(), 0).sum() / some for name, value in values.items()}
    return means | {"tokens": tokens}


def extreme_metrics(mask: Tensor, name: str, values: Tensor) -> dict[str, Tensor]:
    """Smallest and largest over the trainable tokens; inf and -inf, which combine by min and max, if there are none."""
    keep, flat = (mask != 0).flatten(), values.detach().flatten()
    end = flat.new_full((1,), torch.inf)
    return {
        f"{name}_min": torch.cat([torch.where(keep, flat, torch.inf), end]).amin(),
        f"{name}_max": torch.cat([torch.where(keep, flat, -torch.inf), -end]).amax(),
    }


def _wrong_shape(name: str, tensor: Tensor, expected: str) -> SampleError:
    return SampleError(
        name,
        got=f"shape {list(tensor.shape)}",
        expected=expected,
        reason="tensors of other shapes would be stretched over each other, and every token would get wrong numbers",
        remedy="pad all of them to [N, T] or pack all of them to [T]; for packed rows pass the row of each token",
    )
