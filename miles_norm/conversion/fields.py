"""Fields of samples that become columns of train data, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.ids import plain_id
from miles_norm.columns.row_values import response_length, row_length
from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.train_data.ragged import Ragged

__all__ = [
    "EMPTY_ENTRIES",
    "adapter_columns",
    "check_lengths",
    "check_tokens",
    "final_masks",
    "integers_or_list",
    "optional_columns",
    "response_lengths",
]

TOKEN_FIELDS = {
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "opd_reverse_kl": torch.float32,
}
"""Optional fields with one number per response token."""

ROUTING_FIELDS = {"rollout_routed_experts": torch.int32, "rollout_indexer_topk": torch.int32}
"""Optional fields with one entry per token but the first."""

METADATA_FIELDS = (
    "raw_reward",
    "round_number",
    "length_penalty",
    "length_penalty_applied",
    "length_base_reward",
    "length_shaped_reward",
    "length_reward_delta",
    "length_effective_response_length",
    "length_success",
    "length_group_eligible",
)
"""Entries of a sample's metadata that the trainer gets as columns; ``raw_reward`` replaces the reward there."""

EMPTY_ENTRIES: dict[str, Any] = {"multimodal_train_inputs": None, "weight_versions": []}
"""Optional columns that some rows may lack, and what stands there: a row without images is no mistake."""


def response_lengths(given: list[Any], masks: list[Any]) -> list[int]:
    """``response_length`` of each row, without it the length of its mask.

    Raises:
        SampleError: what is no length; all rows are named.
    """
    if set(map(type, given)) == {int} and min(given) >= 0:
        return given
    lengths, problems = [], {}
    for row, (length, mask) in enumerate(zip(given, masks, strict=True)):
        try:
            lengths.append(response_length(row_length(mask) if length is None else length))
        except ValueError as problem:
            problems[row] = str(problem)
    if problems:
        bad = list(problems)
        raise SampleError(
            f"response_length of {format_rows(bad)}",
            got="; ".join(f"row {row}: {problems[row]}" for row in bad[:10]),
            expected="a whole number from 0 on, or None and a loss_mask of that length",
            reason="the response is the end of the tokens",
            remedy="set response_length to the number of response tokens",
            rows=bad,
        )
    return lengths


def check_tokens(tokens: list[Any], lengths: list[int]) -> None:
    """Refuse rows with fewer tokens than their response has."""
    found = list(map(row_length, tokens))
    bad = [n for n, (size, length) in enumerate(zip(found, lengths, strict=True)) if size is None or size < length]
    if bad:
        sizes = ["no tokens" if found[n] is None else f"{found[n]} tokens" for n in bad[:10]]
        raise SampleError(
            f"tokens of {format_rows(bad)}",
            got=", ".join(
                f"row {n}: {size} for a response of {lengths[n]}" for n, size in zip(bad, sizes, strict=False)
            ),
            expected="prompt and response tokens, at least response_length of them",
            reason="the response is the end of the tokens",
            remedy="set tokens to prompt plus response, and response_length to the length of the response",
            rows=bad,
        )


def check_lengths(name: str, values: list[Any], lengths: Sequence[int]) -> None:
    """Refuse values of another length; None is no value."""
    found = list(map(row_length, values))
    if found == lengths:
        return
    bad = [n for n, value in enumerate(values) if value is not None and found[n] != lengths[n]]
    if bad:
        sizes = [shown(values[n]) if found[n] is None else f"{found[n]} entries" for n in bad[:10]]
        raise SampleError(
            f"{name} of {format_rows(bad)}",
            got=", ".join(f"row {n}: {size}" for n, size in zip(bad, sizes, strict=False)),
            expected=", ".join(f"row {n}: {lengths[n]}" for n in bad[:10]),
            reason="each entry belongs to one token",
            remedy=f"cut or extend {name} together with the tokens",
            rows=bad,
        )


def integers_or_list(values: list[Any]) -> Tensor | list[Any]:
    """Integers of int64 as a tensor, anything else as it is; numbers out of tensors and tables are numbers."""
    if set(map(type, values)) != {int}:
        values = [plain_id(value) for value in values]
    if set(map(type, values)) == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return torch.tensor(values, dtype=torch.int64)
    return values


def final_masks(masks: list[Any], lengths: list[int], silenced: Tensor) -> list[Any]:
    """The masks that are trained: ones where there is none, zeros on rows whose tokens were taken away."""
    emptied = torch.nonzero(silenced)[:, 0].tolist()
    final = list(masks)
    if NoneType in set(map(type, masks)):
        final = [[1] * length if mask is None else mask for mask, length in zip(masks, lengths, strict=True)]
    for row in emptied:
        final[row] = _zeros_like(final[row])
    return final


def _zeros_like(mask: Any) -> Any:
    if isinstance(mask, Tensor):
        return torch.zeros_like(mask)
    return np.zeros_like(mask) if isinstance(mask, np.ndarray) else [0] * len(mask)


def optional_columns(field: Callable[[str], list[Any]], tokens: list[Any], lengths: list[int]) -> dict[str, Any]:
    """Of the optional fields each that the rows have."""
    columns: dict[str, Any] = {}
    for name, dtype in (TOKEN_FIELDS | ROUTING_FIELDS).items():
        values = field(name)
        if _on_all_rows(name, values):
            expected = lengths if name in TOKEN_FIELDS else [max(len(row) - 1, 0) for row in tokens]
            check_lengths(name, values, expected)
            columns[name] = Ragged.from_rows(values, dtype)
    train_metadata = field("train_metadata")
    if _on_all_rows("train_metadata", train_metadata):
        columns["metadata"] = train_metadata
    for name, empty in EMPTY_ENTRIES.items():
        values = field(name)
        if set(map(type, values)) == {NoneType}:
            continue
        if any(value is not None and (name != "weight_versions" or row_length(value) != 0) for value in values):
            columns[name] = [empty if value is None else value for value in values]
    metadata = field("metadata")
    if set(map(type, metadata)) != {dict}:
        metadata = [entry if isinstance(entry, Mapping) else {} for entry in metadata]
    present = set().union(*metadata)
    for name in METADATA_FIELDS:
        if name not in present:
            continue
        values = [entry.get(name) for entry in metadata]
        if _on_all_rows(f"metadata[{name!r}]", values):
            columns[name] = values
    return columns


def _on_all_rows(name: str, values: list[Any]) -> bool:
    kinds = set(map(type, values))
    if NoneType not in kinds:
        return True
    if len(kinds) > 1:
        lacking = [n for n, value in enumerate(values) if value is None]
        raise SampleError(
            f"{name} of {format_rows(lacking)}",
            got=f"None, while {len(values) - len(lacking)} other rows have it",
            expected="a value on every row or on none",
            reason="the trainer reads the field for the whole batch or not at all",
            remedy="set it on every row, or clear it on all",
            rows=lacking,
        )
    return False


def adapter_columns(
    field: Callable[[str], list[Any]], metadata: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns and step entries of a batch with several adapters."""
    adapters = field("adapter")
    if not _on_all_rows("adapter", adapters):
        return {}, {}
    slots = [_member(adapter, "slot") for adapter in adapters]
    lacking = [n for n, slot in enumerate(slots) if type(slot) is not int]
    if lacking:
        raise SampleError(
            f"adapter of {format_rows(lacking)}",
            got=f"the slot {slots[lacking[0]]!r}",
            expected="a name and a whole number as slot, as in AdapterRef",
            reason="the trainer finds the adapter's weights by its slot",
            remedy="set the slot, or use normalize_rewards where no trainer is involved",
            rows=lacking,
        )
    step_slots = sorted(metadata.get("step_slots") or [])
    sizes = _step_batch_sizes(field("metadata"), slots, set(step_slots))
    step = {
        "step_slots": step_slots,
        "step_adapter_names": sorted(metadata.get("step_adapter_names") or []),
        "step_adapter_batch_sizes": sizes,
    }
    return {"adapter_slots": torch.tensor(slots, dtype=torch.int64)}, step


def _step_batch_sizes(of_rows: list[Any], slots: list[int], stepped: set[int]) -> dict[int, int]:
    """Rollouts per update of each adapter that is stepped, as its samples' metadata say."""
    sizes: dict[int, int] = {}
    lacking = []
    for row, (metadata, slot) in enumerate(zip(of_rows, slots, strict=True)):
        if slot in stepped:
            size = metadata.get("adapter_global_batch_size") if isinstance(metadata, Mapping) else None
            if size is None:
                lacking.append(row)
            else:
                sizes[slot] = size
    if lacking:
        raise SampleError(
            f"metadata of {format_rows(lacking)}",
            got="no adapter_global_batch_size",
            expected="the rollouts per update of the row's adapter, since its slot is in step_slots",
            reason="the trainer divides the adapter's gradient by it",
            remedy="set metadata['adapter_global_batch_size'] on every row of a stepped adapter",
            rows=lacking,
        )
    return sizes


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
