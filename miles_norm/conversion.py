"""Samples to ``TrainData``: what a trainer eats, under Miles' keys, without copying token lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import ge
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns.sample_columns import flatten_samples, row_fields
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss import UpdatePlan, loss_weights
from miles_norm.normalize import normalize_rewards
from miles_norm.result import NormalizedRewards
from miles_norm.train_data import TrainData
from miles_norm.train_data.ragged import Ragged

__all__ = ["convert_samples_to_train_data", "result_columns", "train_data_from_columns", "train_data_from_result"]

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

STEP_FIELDS = ("prompt_group_sizes", "step_slots", "step_adapter_names", "dynamic_global_batch_size")


def convert_samples_to_train_data(
    samples: Iterable[Any],
    config: NormalizationConfig | None = None,
    metadata: Mapping[str, Any] | None = None,
    loss_config: LossConfig | None = None,
) -> TrainData:
    """Normalize the rewards and lay out everything that the trainer needs, in columns.

    The keys are those of Miles' own conversion: tokens, response_lengths, rewards (the advantages), raw_reward,
    truncated, sample_indices, rollout_ids, loss_masks, rollout_mask_sums; of the optional fields each that the samples
    or the metadata have; and two of ours, weights (loss weight per row) and trained.

    Args:
        samples: Rows, flat or nested, as ``normalize_rewards`` takes them. They are read, never changed: lists of
            tokens, log-probs and masks are referred to, not copied.
        config: Defaults to ``NormalizationConfig()``.
        metadata: Of the rollout step, as Miles passes it: prompt_group_sizes, step_slots, step_adapter_names,
            dynamic_global_batch_size.
        loss_config: For the column ``weights``; defaults to ``LossConfig()``.

    ``rollout_ids`` are the samples' own where these are integers that name each rollout once, else 0 to R - 1: a
    trainer counts distinct ids, and one id in two groups would merge two rollouts. ``loss_masks`` are ones where a
    sample has none, and zeros for rows that are removed, padding, untrained or excluded. ``rollout_mask_sums`` add up
    these masks per rollout.

    Raises:
        SampleError: tokens shorter than the response, a mask or log-probs of another length than the response, an
            optional field that only some rows have; all rows are named.
        MilesNormError: whatever ``normalize_rewards`` raises.

    >>> rows = [{"group_index": 0, "index": i, "reward": r, "tokens": [7, 8, 9], "response_length": 2}
    ...         for i, r in enumerate((1.0, 0.0))]
    >>> data = convert_samples_to_train_data(rows, NormalizationConfig(advantage_estimator="dr_grpo"))
    >>> data.as_miles_dict()["loss_masks"], data["rewards"].tolist()
    ([[1, 1], [1, 1]], [0.5, -0.5])
    """
    metadata = metadata or {}
    samples = samples if isinstance(samples, Sequence) else list(samples)
    result = normalize_rewards(samples, config, metadata.get("prompt_group_sizes"))
    return train_data_from_result(samples, result, metadata, loss_config)


def train_data_from_result(
    samples: Iterable[Any],
    result: NormalizedRewards,
    metadata: Mapping[str, Any] | None = None,
    loss_config: LossConfig | None = None,
    plan: UpdatePlan | None = None,
) -> TrainData:
    """``convert_samples_to_train_data`` for samples whose rewards are normalized already.

    Args:
        samples: Those that ``result`` was computed from.
        result: Of ``normalize_rewards``, or filtered.
        metadata: Of the rollout step.
        loss_config: For the column ``weights``.
        plan: Of ``plan_updates``: ``weights`` then count what each update holds.

    Raises:
        SampleError: as there, or a result of another number of rows.
    """
    return train_data_from_columns(samples, result_columns(result, loss_config, plan), metadata)


def result_columns(
    result: NormalizedRewards, loss_config: LossConfig | None = None, plan: UpdatePlan | None = None
) -> dict[str, Tensor]:
    """What a result says of each row: the columns of train data for which no sample is looked at, each ``[N]``.

    They are what has to come back to samples that are elsewhere. ``silenced`` is for the masks: rows that have
    trainable tokens and may not train them.

    >>> from miles_norm import RolloutColumns, normalize_columns
    >>> columns = RolloutColumns(group=[0] * 3, rollout=[7, 7, 9], reward=[1, 1, 0], trainable_tokens=[2, 3, 4])
    >>> found = result_columns(normalize_columns(columns))
    >>> found["rollout_ids"].tolist(), found["rollout_mask_sums"].tolist()
    ([7, 7, 9], [5, 5, 4])
    """
    index = result.index
    mask_sums = torch.zeros(index.num_rollouts, dtype=torch.int64, device=index.row_rollout.device)
    mask_sums.index_add_(0, index.row_rollout, result.trainable_tokens)
    return {
        "rewards": result.advantages,
        "raw_reward": result.raw_rewards,
        "truncated": _truncated(result),
        "rollout_ids": _rollout_ids(result),
        "rollout_mask_sums": mask_sums[index.row_rollout],
        "weights": loss_weights(result, loss_config, plan),
        "trained": result.trained_rows,
        "silenced": (result.columns.trainable_tokens > 0) & ~result.trained_rows,
    }


def train_data_from_columns(
    samples: Iterable[Any], found: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None
) -> TrainData:
    """Train data from samples and what ``result_columns`` says of each of them.

    Raises:
        SampleError: columns of another number of rows, and as ``convert_samples_to_train_data``.
    """
    rows = flatten_samples(samples)[0]
    if any(issubclass(kind, Mapping) and not issubclass(kind, dict) for kind in set(map(type, rows))):
        rows = [dict(row) if isinstance(row, Mapping) else row for row in rows]
    if len(rows) != len(found["rewards"]):
        raise SampleError(
            "samples",
            got=f"{len(rows)} rows",
            expected=f"the {len(found['rewards'])} rows that the result was computed from",
            reason="advantages and masks are matched by position",
            remedy="normalize these samples, or pass those of the result",
        )
    metadata, field = metadata or {}, row_fields(rows)
    tokens, masks = field("tokens"), field("loss_mask")
    lengths = _response_lengths(field("response_length"), masks)
    _check_tokens(tokens, lengths)
    _check_lengths("loss_mask", masks, lengths)
    columns: dict[str, Any] = {
        "tokens": Ragged.from_rows(tokens, torch.int64),
        "response_lengths": torch.tensor(lengths, dtype=torch.int64),
        "rewards": found["rewards"],
        "raw_reward": found["raw_reward"],
        "truncated": found["truncated"],
        "sample_indices": _integers_or_list(field("index")),
        "rollout_ids": found["rollout_ids"],
        "loss_masks": Ragged.from_rows(_final_masks(masks, lengths, found["silenced"]), torch.uint8),
        "rollout_mask_sums": found["rollout_mask_sums"],
        "weights": found["weights"],
        "trained": found["trained"],
    }
    columns |= _optional_columns(field, tokens, lengths)
    adapters, step = _adapters(field, metadata)
    columns |= adapters
    step |= {name: metadata[name] for name in STEP_FIELDS if metadata.get(name) is not None and name not in step}
    return TrainData(columns, step)


def _response_lengths(given: list[Any], masks: list[Any]) -> list[int]:
    if set(map(type, given)) == {int}:
        return given
    lengths = [
        len(mask) if length is None and mask is not None else length for length, mask in zip(given, masks, strict=True)
    ]
    return [int(length) for length in lengths]


def _check_tokens(tokens: list[Any], lengths: list[int]) -> None:
    if NoneType not in set(map(type, tokens)) and all(map(ge, map(len, tokens), lengths)):
        return
    bad = [n for n, (row, length) in enumerate(zip(tokens, lengths, strict=True)) if row is None or len(row) < length]
    if bad:
        sizes = ["no tokens" if tokens[n] is None else f"{len(tokens[n])} tokens" for n in bad[:10]]
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


def _check_lengths(name: str, values: list[Any], lengths: Sequence[int]) -> None:
    """Refuse values of another length; None is no value."""
    if NoneType not in set(map(type, values)) and list(map(len, values)) == lengths:
        return
    bad = [
        n
        for n, (value, length) in enumerate(zip(values, lengths, strict=True))
        if value is not None and len(value) != length
    ]
    if bad:
        raise SampleError(
            f"{name} of {format_rows(bad)}",
            got=", ".join(f"row {n}: {len(values[n])} entries" for n in bad[:10]),
            expected=", ".join(f"row {n}: {lengths[n]}" for n in bad[:10]),
            reason="each entry belongs to one token",
            remedy=f"cut or extend {name} together with the tokens",
            rows=bad,
        )


def _truncated(result: NormalizedRewards) -> Tensor:
    truncated = result.columns.truncated
    return torch.zeros_like(result.index.row_rollout) if truncated is None else truncated.to(torch.int64)


def _integers_or_list(values: list[Any]) -> Tensor | list[Any]:
    if set(map(type, values)) == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return torch.tensor(values, dtype=torch.int64)
    return values


def _rollout_ids(result: NormalizedRewards) -> Tensor:
    """int64 ``[N]``, one id per rollout: the given ones where these are integers and name each rollout once."""
    index = result.index
    column = index.rollout_column
    if column is not None and column.labels is None and column.missing is None:
        ids = column.codes[index.first_row]
        if len(torch.unique(ids)) == len(ids):
            return column.codes
    return index.row_rollout


def _final_masks(masks: list[Any], lengths: list[int], silenced: Tensor) -> list[Any]:
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


def _optional_columns(field: Callable[[str], list[Any]], tokens: list[Any], lengths: list[int]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, dtype in (TOKEN_FIELDS | ROUTING_FIELDS).items():
        values = field(name)
        if _on_all_rows(name, values):
            expected = lengths if name in TOKEN_FIELDS else [max(len(row) - 1, 0) for row in tokens]
            _check_lengths(name, values, expected)
            columns[name] = Ragged.from_rows(values, dtype)
    train_metadata = field("train_metadata")
    if _on_all_rows("train_metadata", train_metadata):
        columns["metadata"] = train_metadata
    # A row without images or without a recorded version is no mistake.
    for name, empty in (("multimodal_train_inputs", None), ("weight_versions", [])):
        values = field(name)
        if set(map(type, values)) == {NoneType}:
            continue
        if any(value is not None and (name != "weight_versions" or len(value)) for value in values):
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


def _adapters(field: Callable[[str], list[Any]], metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
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
