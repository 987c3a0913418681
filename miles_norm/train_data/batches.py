"""Columns of train data to the fields of a batch: packed, then padded if that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows
from miles_norm.train_data.ragged import Ragged
from miles_norm.train_data.ragged_checks import repeated

__all__ = ["packed_fields", "padded_fields"]


def packed_fields(columns: Mapping[str, Any], response_columns: Sequence[str]) -> dict[str, Tensor]:
    """Fields ``[T]``, all rows one after the other and aligned to token positions; ``weights`` is ``[N]``.

    Raises:
        SampleError: loss masks with entries other than 0 and 1; all rows are named. Looked for on the CPU; on another
            device that would wait for it.
    """
    tokens: Ragged = columns["tokens"]
    input_ids, offsets, lengths = tokens.values.to(torch.int64), tokens.offsets, tokens.lengths
    device, total = input_ids.device, len(input_ids)
    response = columns["response_lengths"].to(device)
    position_ids = torch.arange(total, device=device) - repeated(offsets[:-1], lengths, total)
    response_mask = position_ids >= repeated(lengths - response, lengths, total)
    fields = {"input_ids": input_ids, "position_ids": position_ids, "response_mask": response_mask}
    masks = columns.get("loss_masks")
    loss_mask = response_mask if masks is None else _placed(_binary(masks).to(device), response_mask)
    fields["loss_mask"] = loss_mask
    if "rewards" in columns:
        rewards = _row_values(columns["rewards"], torch.float32, device)
        per_token = repeated(rewards, lengths, total)
        fields["advantages"] = torch.where(loss_mask, per_token, torch.zeros((), dtype=rewards.dtype, device=device))
    for name in response_columns:
        if name in columns and name != "loss_masks":
            fields[name] = _placed(columns[name].values.to(device), response_mask)
    if "weights" in columns:
        fields["weights"] = _row_values(columns["weights"], torch.float64, device)
    return fields


def padded_fields(
    fields: Mapping[str, Tensor], offsets: Tensor, length: int | None, pad_token_id: int
) -> dict[str, Tensor]:
    """The fields of ``packed_fields`` as ``[N, T]``, with an ``attention_mask``; ``weights`` stays ``[N]``."""
    padded: dict[str, Tensor] = {}
    for name, values in fields.items():
        if name == "weights":
            padded[name] = values
        elif name != "position_ids":
            fill = pad_token_id if name == "input_ids" else 0
            padded[name] = Ragged(values, offsets).padded(length, fill)
            if name == "input_ids":
                positions = torch.arange(padded[name].shape[1], device=offsets.device)
                padded["attention_mask"] = positions < offsets.diff()[:, None]
    return padded


def _placed(entries: Tensor, response_mask: Tensor) -> Tensor:
    """Entries of response tokens at these tokens' positions, 0 elsewhere; both are in order of rows and tokens."""
    return entries.new_zeros(len(response_mask)).masked_scatter_(response_mask, entries)


def _binary(masks: Ragged) -> Tensor:
    values = masks.values
    if values.device.type != "cpu":
        return values != 0
    wrong = (values != 0) & (values != 1)
    if bool(wrong.any()):
        where = torch.nonzero(wrong)[:, 0]
        bad = torch.unique(torch.searchsorted(masks.offsets, where, right=True) - 1).tolist()
        raise SampleError(
            f"loss mask of {format_rows(bad)}",
            got=f"the entry {values[where[0]].item()}",
            expected="0 and 1 only",
            reason="a token is trained or not; how much its row weighs stands in weights",
            remedy="set entries to 0 or 1",
            rows=bad,
        )
    return values != 0


def _row_values(column: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(column, Tensor):
        return column.to(device)
    return torch.tensor(column, dtype=dtype, device=device)
