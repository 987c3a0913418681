"""The loss masks that Miles and slime hand to a reducer of the policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from miles_norm.columns.ids import entries_of, plain_id
from miles_norm.columns.masks import count_each_mask
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss.checks import NUMBERS, described, is_dense, is_whole, on_cpu

__all__ = ["joined_masks"]

_DTYPES: Final = (torch.bool, *NUMBERS)


def joined_masks(masks: Any, response_lengths: Any) -> Tensor:
    """The loss masks of a micro-batch as one, ``[T]``.

    Raises:
        SampleError: what is not one mask per row, of the length of its response; on the CPU also entries other than 0
            and 1, where on a device a look would wait for it. All rows are named.
    """
    rows, lengths = entries_of(masks), entries_of(response_lengths)
    if not rows or lengths is None or len(lengths) != len(rows):
        found = {"loss_masks": (masks, rows), "response_lengths": (response_lengths, lengths)}
        sizes = (f"{name}: {described(all_) if each is None else len(each)}" for name, (all_, each) in found.items())
        raise _bad_masks("loss_masks", ", ".join(sizes))
    bad = {
        row: described(mask)
        for row, (mask, length) in enumerate(zip(rows, lengths, strict=True))
        if not (is_dense(mask) and mask.dtype in _DTYPES and mask.ndim == 1 and _is_length(length, len(mask)))
    }
    devices = {mask.device for row, mask in enumerate(rows) if row not in bad}
    if len(devices) > 1:
        raise _bad_masks("loss_masks", f"tensors on {' and '.join(sorted(map(str, devices)))}")
    if not bad and on_cpu(rows[0]):
        bad = count_each_mask(rows)[1]
    if bad:
        got = "; ".join(f"row {row}: {problem}" for row, problem in list(bad.items())[:10])
        raise _bad_masks(f"loss_masks of {format_rows(list(bad))}", got, list(bad))
    return torch.cat(rows)


def _is_length(value: Any, length: int) -> bool:
    given = plain_id(value)
    return is_whole(given) and given == length


def _bad_masks(subject: str, got: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="one tensor of 0 and 1 per row of the micro-batch, as long as its response",
        reason="the loss of a token that belongs to no mask would be lost, or counted more than once",
        remedy="pass response_lengths and loss_masks as the trainer hands them to a reducer",
        rows=rows,
    )
