"""What the policy losses share: token layouts, values that cannot be trained, ratios that cannot overflow, metrics
without a host sync.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.loss.checks import (
    FLOATS,
    NUMBERS,
    checked_index,
    is_dense,
    is_whole,
    on_cpu,
    whole_tensor,
    wrong_tensor,
)

__all__ = [
    "check_tokens",
    "extreme_metrics",
    "log_ratio_of",
    "mean_metrics",
    "row_of_tokens",
    "spread_rows",
    "trained_values",
]

LIMIT = 20.0
"""Log-ratios beyond this are cut off: e^20 is 4.9e8, and an exponential that overflows makes every gradient NaN."""

_PER_ROW = ("advantages", "weights", "log_ratio")
"""Tensors that may also be ``[N, 1]``, one value for a row of padded tokens."""

_DTYPES = {"mask": (torch.bool, *NUMBERS), "advantages": NUMBERS, "weights": NUMBERS}
"""What else than floating-point numbers a tensor may hold."""


def row_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The row of each token of a packed sequence: int64 ``[T]``.

    Args:
        cu_seqlens: Where each row begins, and where the last one ends: whole numbers ``[N + 1]``.
        num_tokens: T, so that the length is known without asking the device.

    Raises:
        SampleError: ends that do not rise from 0 to ``num_tokens``. Checked for a tensor on the CPU; on another device
            a check would wait for it.

    >>> row_of_tokens(torch.tensor([0, 2, 2, 5]), 5).tolist()
    [0, 0, 2, 2, 2]
    """
    ends = whole_tensor("cu_seqlens", cu_seqlens, "where each row begins, and where the last one ends [N + 1]")
    if not is_whole(num_tokens):
        raise _wrong_ends("num_tokens", shown(num_tokens), "the length of the packed tokens, a whole number")
    if not len(ends) or (on_cpu(ends) and not _rise(ends, num_tokens)):
        first = f"{ends[:10].tolist()}{', ...' if len(ends) > 10 else ''}" if len(ends) else "no end"
        expected = f"where each row begins, rising from 0 to {num_tokens}"
        raise _wrong_ends("cu_seqlens", f"{first} for {num_tokens} tokens", expected)
    # Not repeat_interleave: with an output_size that the lengths do not add up to it writes past its memory.
    tokens = torch.arange(num_tokens, device=ends.device)
    return torch.bucketize(tokens, ends[1:], right=True)


def _rise(ends: Tensor, num_tokens: int) -> bool:
    return int(ends[0]) == 0 and int(ends[-1]) == num_tokens and bool((ends[1:] >= ends[:-1]).all())


def _wrong_ends(name: str, got: str, expected: str) -> SampleError:
    return SampleError(
        name,
        got=got,
        expected=expected,
        reason="every token between two ends belongs to one row, and a token outside of them to none",
        remedy="pass the cu_seqlens of this micro-batch, and the length of its packed tokens as num_tokens",
    )


def check_tokens(name: str, tokens: Tensor) -> None:
    """Refuse what is no tensor of floating-point numbers per token, such as token ids.

    Raises:
        SampleError: another type, dtype or number of dimensions.
    """
    if not is_dense(tokens) or tokens.ndim not in (1, 2) or tokens.dtype not in FLOATS:
        raise wrong_tensor(name, tokens, "floating-point numbers, padded [N, T] or packed [T]")


def spread_rows(values: Tensor, tokens: Tensor, rows: Tensor | None) -> Tensor:
    """Values of rows ``[N]`` in a shape that meets their tokens: ``[N, 1]`` for padded, ``[T]`` for packed ones.

    Raises:
        SampleError: the tokens are not ``[N, T]`` and no row index is given, or the index does not fit them. Its range
            is checked on the CPU; on another device that is left to torch.
    """
    if not is_dense(values) or values.ndim != 1:
        raise wrong_tensor("row values", values, "one value for each row, [N]")
    values = values.to(tokens.device)
    if rows is None:
        if tokens.ndim != 2 or len(tokens) != len(values):
            raise wrong_tensor("row values", values, f"one value for each row of tokens of shape {list(tokens.shape)}")
        return values[:, None]
    index = checked_index("row index", rows, len(values), "the row of each packed token")
    if tokens.ndim != 1 or index.shape != tokens.shape:
        raise wrong_tensor("row index", rows, f"the row of each packed token, with tokens of {list(tokens.shape)}")
    # Unlike values[index] this never counts from the end.
    return values.index_select(0, index.to(values.device))


def trained_values(mask: Tensor, **tensors: Tensor) -> list[Tensor]:
    """Every tensor with 0 where the mask is 0, in float32 at least, so that masked entries may hold anything.

    What a trainable token cannot have, in any of the tensors: a value that is NaN or infinite, a weight below 0, a mask
    entry other than 1. On the CPU that is an error. On another device, where a check would make the host wait, and
    under ``torch.compile`` the token is made NaN in all tensors, and so is its gradient: cutting a ratio off would make
    a plausible number of it.

    Args:
        mask: 1 on trainable tokens.
        tensors: By name; the first has the shape and the dtype that count. Those of ``_PER_ROW`` may be ``[N, 1]``.

    Raises:
        SampleError: a tensor that is not shaped as the first, or such a value; all rows are named.
    """
    name, first = next(iter(tensors.items()))
    check_tokens(name, first)
    per_row = (len(first), 1) if first.ndim == 2 else None
    for other, tensor in {"mask": mask, **tensors}.items():
        dtypes = _DTYPES.get(other, FLOATS)
        fits = is_dense(tensor) and tensor.device == first.device and tensor.dtype in dtypes
        if not fits or (tensor.shape != first.shape and not (other in _PER_ROW and tuple(tensor.shape) == per_row)):
            kind = "numbers" if other in _DTYPES else "floating-point numbers"
            shape = f"the shape of {name}, {list(first.shape)}"
            shape += f", or {list(per_row)}, one value for a row" if other in _PER_ROW and per_row else ""
            raise wrong_tensor(other, tensor, f"{kind} on {first.device} with {shape}")
    dtype, keep = torch.promote_types(first.dtype, torch.float32), mask != 0
    kept = {other: torch.where(keep, tensor.to(dtype), 0.0) for other, tensor in tensors.items()}
    if on_cpu(first):
        if not _all_usable(mask, keep, kept):
            _refuse(mask, keep, kept)
        return list(kept.values())
    unusable = reduce(torch.logical_or, _unusable(mask, keep, kept).values())
    # A factor makes NaN of a gradient of 0 too, which a constant in the place of the value would not.
    factor = torch.where(unusable, torch.nan, 1.0).to(dtype)
    return [values * factor for values in kept.values()]


def _unusable(mask: Tensor, keep: Tensor, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """bool by name, in the shape of the tokens; masked entries, which are 0 here, are usable."""
    unusable = {name: ~torch.isfinite(values) for name, values in kept.items()}
    if "weights" in kept:
        unusable["weights"] |= kept["weights"] < 0
    return {"mask": mask != keep, **unusable}


def _all_usable(mask: Tensor, keep: Tensor, kept: dict[str, Tensor]) -> bool:
    """A cheap yes: a sum is finite only if all of its terms are. A no is to be looked at, since a sum can overflow."""
    sums = torch.stack([values.detach().sum() for values in kept.values()])
    weights = kept.get("weights")
    positive = weights is None or bool((weights >= 0).all())
    return bool(torch.isfinite(sums).all()) and positive and torch.equal(mask, keep.to(mask.dtype))


def _refuse(mask: Tensor, keep: Tensor, kept: dict[str, Tensor]) -> None:
    """Raise if there is an unusable value, and name every row or packed token that has one."""
    found = {
        name: places for name, where in _unusable(mask, keep, kept).items() if (places := where.nonzero().tolist())
    }
    if not found:
        return
    values, padded = {"mask": mask, **kept}, mask.ndim == 2
    places = sorted({place[0] for each in found.values() for place in each})
    got = [
        f"{name} {values[name][tuple(place)].item():g} at "
        f"{f'row {place[0]}, token {place[1]}' if padded else f'token {place[0]}'}"
        for name, each in found.items()
        for place in each
    ]
    raise SampleError(
        f"{' and '.join(found)} of {format_rows(places, 'row' if padded else 'token')}",
        got="; ".join(got[:10]) + (f" and {len(got) - 10} more" if len(got) > 10 else ""),
        expected="finite numbers on trainable tokens, weights not below 0, a mask of 0 and 1",
        reason="a token that was sampled has a finite log-prob; with another one the loss is NaN or made up",
        remedy="mend what computed these values, or set the mask of these tokens to 0",
        rows=places if padded else (),
    )


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
