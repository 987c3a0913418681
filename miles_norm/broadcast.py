"""From rollouts to rows to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import entries_of, is_readable, shared_tensor, unreadable
from miles_norm.errors import SampleError, format_rows

__all__ = ["rollouts_to_rows", "rows_to_tokens"]


def rollouts_to_rows(values: Tensor, row_rollout: Tensor) -> Tensor:
    """Give every row the value of its rollout: ``[R]`` and int64 ``[N]`` to ``[N]``.

    >>> rollouts_to_rows(torch.tensor([2.0, -2.0]), torch.tensor([0, 0, 1])).tolist()
    [2.0, 2.0, -2.0]
    """
    return values.index_select(0, row_rollout)


def rows_to_tokens(values: Tensor, masks: Tensor | Sequence[Any]) -> Tensor | list[Tensor]:
    """Put the value of each row on its own trainable tokens and 0 elsewhere.

    .. math:: A_{n,t} = A_n m_{n,t}

    The scalar is broadcast and then masked. Copying one row's masked tokens to its siblings instead would put zeros
    on tokens that they train.

    Args:
        values: ``[N]``.
        masks: Loss masks: one padded tensor ``[N, T]``, or N ragged lists, arrays or tensors.

    Returns:
        ``[N, T]``, or a list of N tensors as long as the masks.

    Raises:
        SampleError: another number of masks than rows, a mask that is None or not one-dimensional, entries other than 0
            and 1. The entries of one padded tensor are looked at on the CPU; on another device that would wait for it.

    >>> [t.tolist() for t in rows_to_tokens(torch.tensor([2.0, -1.0]), [[1, 0], [0, 1, 1]])]
    [[2.0, 0.0], [0.0, -1.0, -1.0]]
    """
    if isinstance(masks, Tensor):
        if not is_readable(masks):
            raise _bad_masks("loss masks", unreadable(masks), ())
        if masks.ndim != 2 or masks.is_complex():
            raise _bad_masks("loss masks", f"shape {tuple(masks.shape)}, {masks.dtype}", ())
        if len(masks) != len(values):
            raise _bad_masks("loss masks", f"{len(masks)} masks for {len(values)} rows", ())
        mask = masks.to(values.device)
        on_host = mask.device.type == "cpu"
        bad = torch.nonzero(((mask != 0) & (mask != 1)).any(dim=1))[:, 0].tolist() if on_host else []
        if bad:
            raise _bad_masks(f"loss mask of {format_rows(bad)}", "entries other than 0 and 1", bad)
        return torch.where(mask != 0, values[:, None], 0.0)
    entries = entries_of(masks)
    if entries is None:
        raise _bad_masks("loss masks", "None" if masks is None else f"a value of type {type(masks).__name__}", ())
    if len(entries) != len(values):
        raise _bad_masks("loss masks", f"{len(entries)} masks for {len(values)} rows", ())
    ragged = [_as_tensor(mask, values.device) for mask in entries]
    bad = [
        row
        for row, mask in enumerate(ragged)
        if mask is None or mask.ndim != 1 or bool(((mask != 0) & (mask != 1)).any())
    ]
    if bad:
        raise _bad_masks(f"loss mask of {format_rows(bad)}", "None, nested, or entries other than 0 and 1", bad)
    return [torch.where(mask != 0, value, 0.0) for value, mask in zip(values, ragged, strict=True) if mask is not None]


def _as_tensor(mask: Any, device: torch.device) -> Tensor | None:
    """A mask of any kind that columns are counted from; None if it is none."""
    if isinstance(mask, bytes | bytearray):
        mask = list(mask)
    try:
        tensor = shared_tensor(mask) if isinstance(mask, np.ndarray) else torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor.to(device) if is_readable(tensor) else None


def _bad_masks(subject: str, got: str, rows: Sequence[int]) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="one mask of 0 and 1 per row: a padded tensor [N, T] or N one-dimensional lists",
        reason="an advantage is put on the trainable tokens of its own row",
        remedy="pass the rows' loss masks in flattened order; for a row without one, ones of its response length",
        rows=rows,
    )
