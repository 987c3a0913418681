"""Padded batches of a trainer: masks and values ``[N, T]`` that have to fit together before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows
from miles_norm.loss.checks import NUMBERS, is_dense, wrong_tensor

__all__ = ["check_values", "refuse_infinite", "trainable_tokens"]


def trainable_tokens(name: str, mask: Any) -> Tensor:
    """Which tokens a mask marks: bool ``[N, T]``.

    Raises:
        SampleError: no padded tensor with at least one row and one token, entries other than 0 and 1; all rows are
            named.

    >>> trainable_tokens("response_mask", torch.tensor([[1, 0]])).tolist()
    [[True, False]]
    """
    if not _is_padded(mask, (torch.bool, *NUMBERS)):
        raise wrong_tensor(name, mask, "a mask of 0 and 1, padded [N, T], with at least one row and one token")
    keep: Tensor = mask != 0
    if not torch.equal(mask, keep.to(mask.dtype)):
        odd = mask != keep
        rows: list[int] = odd.any(dim=1).nonzero()[:, 0].tolist()
        raise SampleError(
            f"{name} of {format_rows(rows)}",
            got="entries such as " + ", ".join(f"{value:g}" for value in mask[odd][:5].tolist()),
            expected="0 and 1",
            reason="an entry is one trainable token or none, and rollouts are divided by their number",
            remedy="weigh tokens in the loss, and pass the mask of the tokens that are trained",
            rows=rows,
        )
    return keep


def check_values(name: str, values: Any, keep: Tensor, dtypes: Sequence[torch.dtype] = NUMBERS) -> None:
    """Refuse values that are not one number for each token of the mask ``[N, T]``.

    Raises:
        SampleError: another shape, dtype or device.
    """
    if not _is_padded(values, dtypes) or values.shape != keep.shape or values.device != keep.device:
        numbers = "numbers" if torch.int64 in dtypes else "floating-point numbers"
        raise wrong_tensor(name, values, f"{numbers} on {keep.device} of shape {list(keep.shape)}, as the mask has it")


def refuse_infinite(name: str, values: Tensor, keep: Tensor) -> None:
    """Refuse NaN and infinite values on trainable tokens; elsewhere anything may stand.

    Raises:
        SampleError: all rows are named.
    """
    bad = keep & ~torch.isfinite(values)
    rows: list[int] = bad.any(dim=1).nonzero()[:, 0].tolist()
    if rows:
        raise SampleError(
            f"{name} of {format_rows(rows)}",
            got=", ".join(f"{value:g}" for value in values[bad][:5].tolist()),
            expected="finite numbers on trainable tokens",
            reason="one such token makes the loss of the whole batch NaN",
            remedy="mend what computed these values, or set the mask of these tokens to 0",
            rows=rows,
        )


def _is_padded(tensor: Any, dtypes: Sequence[torch.dtype]) -> bool:
    dense = is_dense(tensor) and not tensor.is_meta and tensor.dtype in dtypes
    return dense and tensor.ndim == 2 and tensor.numel() > 0
