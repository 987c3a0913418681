"""What the policy losses share: token layouts, ratios that cannot overflow, metrics without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_norm.errors import SampleError

__all__ = [
    "extreme_metrics",
    "log_ratio_of",
    "mean_metrics",
    "row_of_tokens",
    "spread_rows",
    "trained_values",
    "wrong_shape",
]

LIMIT = 20.0
"""Log-ratios beyond this are cut off: e^20 is 4.9e8, and an exponential that overflows makes every gradient NaN."""


def row_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The row of each token of a packed sequence: int64 ``[T]``.

    Args:
        cu_seqlens: Where each row begins, and where the last one ends ``[N + 1]``.
        num_tokens: T, so that the length is known without asking the device.

    Raises:
        SampleError: ends that do not rise from 0 to ``num_tokens``. Checked for a tensor on the CPU; on another device
            a check would wait for it.

    >>> row_of_tokens(torch.tensor([0, 2, 2, 5]), 5).tolist()
    [0, 0, 2, 2, 2]
    """
    if cu_seqlens.device.type == "cpu":
        _check_ends(cu_seqlens, num_tokens)
    # Not repeat_interleave: with an output_size that the lengths do not add up to it writes past its memory.
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:].to(torch.int64), right=True)


def spread_rows(values: Tensor, tokens: Tensor, rows: Tensor | None) -> Tensor:
    """Values of rows ``[N]`` in a shape that meets their tokens: ``[N, 1]`` for padded, ``[T]`` for packed ones.

    Raises:
        SampleError: the tokens are not ``[N, T]`` and no row index is given, or the index does not fit them.
    """
    if values.ndim != 1:
        raise wrong_shape("row values", values, "one value for each row, [N]")
    if rows is None:
        if tokens.ndim != 2 or len(tokens) != len(values):
            raise wrong_shape("row values", values, f"one value for each row of tokens of shape {list(tokens.shape)}")
        return values[:, None]
    if tokens.ndim != 1 or rows.shape != tokens.shape:
        raise wrong_shape("row index", rows, f"the row of each packed token, with tokens of {list(tokens.shape)}")
    if rows.dtype.is_floating_point or rows.dtype == torch.bool:
        raise wrong_shape("row index", rows, "whole numbers, the row of each packed token")
    return values[rows]


def trained_values(log_probs: Tensor, mask: Tensor, **others: Tensor) -> list[Tensor]:
    """Every tensor with 0 where the mask is 0, in float32 at least, so that masked entries may hold anything.

    Raises:
        SampleError: a tensor that is not shaped as the log-probs. ``advantages`` may also be ``[N, 1]``.
    """
    if mask.shape != log_probs.shape:
        raise wrong_shape("mask", mask, f"the shape of the log-probs, {list(log_probs.shape)}")
    per_row = (len(log_probs), 1) if log_probs.ndim == 2 else None
    for name, tensor in others.items():
        if tensor.shape != log_probs.shape and not (name == "advantages" and tuple(tensor.shape) == per_row):
            raise wrong_shape(name, tensor, f"the shape of the log-probs, {list(log_probs.shape)}")
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


def _check_ends(cu_seqlens: Tensor, num_tokens: int) -> None:
    ends = cu_seqlens.detach().numpy()
    if ends.ndim == 1 and len(ends) and ends[0] == 0 and ends[-1] == num_tokens and (ends[1:] >= ends[:-1]).all():
        return
    raise SampleError(
        "cu_seqlens",
        got=f"{ends.ravel()[:10].tolist()}{', ...' if ends.size > 10 else ''} for {num_tokens} tokens",
        expected=f"where each row begins, rising from 0 to {num_tokens}",
        reason="every token between two ends belongs to one row, and a token outside of them to none",
        remedy="pass the cu_seqlens of this micro-batch, and the length of its packed tokens as num_tokens",
    )


def wrong_shape(name: str, tensor: Tensor, expected: str) -> SampleError:
    """What to raise for a tensor that does not fit the others."""
    return SampleError(
        name,
        got=f"{tensor.dtype} of shape {list(tensor.shape)}",
        expected=expected,
        reason="tensors of other shapes would be stretched over each other, and every token would get wrong numbers",
        remedy="pad all of them to [N, T] or pack all of them to [T]; for packed rows pass the row of each token",
    )
