"""Token ids and numbers per token in the rows of a hook, looked at before a trainer turns them into tensors.

Why: a tensor library truncates 2.5, and an embedding of -1 is none or another token's: nothing need fail.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.sample_columns import row_field
from miles_norm.conversion.fields import TOKEN_FIELDS
from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.loss.checks import FLOATS, WHOLE, is_dense, is_number

__all__ = ["are_tokens", "check_token_fields"]

_LOWEST = torch.finfo(torch.float32).min


def check_token_fields(rows: list[Any]) -> None:
    """Refuse tokens that are no token ids, and log-probs (teachers' and KL too) that are no finite numbers.

    Rows without the field are left to the conversion.

    Raises:
        SampleError: for the first field that has such a row; all rows are named.
    """
    _check(rows, "tokens", are_tokens, "whole numbers from 0 to 2**31 - 1")
    for name in TOKEN_FIELDS:
        _check(rows, name, _are_finite, "finite numbers")


def _check(rows: list[Any], name: str, fits: Callable[[Any], bool], expected: str) -> None:
    values = row_field(rows, name)
    if set(map(type, values)) == {NoneType}:
        return
    bad = [row for row, value in enumerate(values) if value is not None and not fits(value)]
    if bad:
        raise SampleError(
            f"{name} of {format_rows(bad)}",
            got="; ".join(f"row {row}: {_odd_entry(values[row], fits)}" for row in bad[:5]),
            expected=f"a list, array or tensor of {expected}",
            reason="the trainer makes a tensor of them, which would hold other numbers than were sampled, or NaN",
            remedy="pass what the engine returned; a row that cannot be mended can be left out by the rollout function",
            rows=bad,
        )


def are_tokens(row: Any) -> bool:
    """Whether a list, array or tensor holds token ids, and nothing else.

    >>> are_tokens([7, 0]), are_tokens([7, -1]), are_tokens([7, 2.0]), are_tokens("70")
    (True, False, False, False)
    """
    if isinstance(row, list | tuple):
        # One call per row, which looks at the type and the range of every entry.
        flat = array("I")
        try:
            flat.fromlist(row if isinstance(row, list) else list(row))
        except (TypeError, ValueError, OverflowError):
            return False
        return not flat or int(np.frombuffer(flat, np.int32).min()) >= 0
    if isinstance(row, np.ndarray):
        if row.ndim != 1 or row.dtype.kind not in "iu":
            return False
        return not row.size or 0 <= int(row.min()) <= int(row.max()) < 2**31
    if not is_dense(row) or row.is_meta or row.ndim != 1 or row.dtype not in WHOLE:
        return False
    return not row.numel() or 0 <= int(row.min()) <= int(row.max()) < 2**31


def _are_finite(row: Any) -> bool:
    if isinstance(row, list | tuple):
        try:
            total = sum(row)
        except TypeError:
            return False
        if isinstance(total, float | int) and math.isfinite(total):
            return True
        return all(is_number(value, _LOWEST) for value in row)  # a sum can overflow, or be of numpy's
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and row.dtype.kind in "iuf" and bool(np.isfinite(row).all())
    dense = is_dense(row) and not row.is_meta and row.ndim == 1 and row.dtype in (*WHOLE, *FLOATS)
    return dense and bool(torch.isfinite(row).all())


def _odd_entry(row: Any, fits: Callable[[Any], bool]) -> str:
    """The first entry that does not fit, or what is there in place of a row."""
    entries: Sequence[Any] = row if isinstance(row, list | tuple) else ()
    readable = isinstance(row, np.ndarray) or (is_dense(row) and not row.is_meta)
    if readable and row.ndim == 1:
        entries = row.tolist()
    odd = next((position for position, entry in enumerate(entries) if not fits([entry])), None)
    if odd is not None:
        return f"{shown(entries[odd])} at {odd}"
    dtype = f" and dtype {row.dtype}" if isinstance(row, np.ndarray | Tensor) else ""
    return f"a value of type {type(row).__name__}{dtype}"
