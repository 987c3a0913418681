"""Samples to ``TrainData``: what a trainer eats, under Miles' keys, without copying token lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.columns.sample_columns import flatten_samples, row_fields
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.conversion.fields import (
    adapter_columns,
    check_lengths,
    check_tokens,
    final_masks,
    integers_or_list,
    optional_columns,
    response_lengths,
)
from miles_norm.errors import SampleError
from miles_norm.loss import UpdatePlan, loss_weights
from miles_norm.normalize import normalize_rewards
from miles_norm.result import NormalizedRewards
from miles_norm.train_data import TrainData
from miles_norm.train_data.ragged import Ragged

__all__ = ["convert_samples_to_train_data", "result_columns", "train_data_from_columns", "train_data_from_result"]

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
        SampleError: metadata that is no mapping, tokens shorter than the response, a mask or log-probs of another
            length than the response, an optional field that only some rows have; all rows are named.
        MilesNormError: whatever ``normalize_rewards`` raises.

    >>> rows = [{"group_index": 0, "index": i, "reward": r, "tokens": [7, 8, 9], "response_length": 2}
    ...         for i, r in enumerate((1.0, 0.0))]
    >>> data = convert_samples_to_train_data(rows, NormalizationConfig(advantage_estimator="dr_grpo"))
    >>> data.as_miles_dict()["loss_masks"], data["rewards"].tolist()
    ([[1, 1], [1, 1]], [0.5, -0.5])
    """
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping):
        raise SampleError(
            "metadata",
            got=f"a value of type {type(metadata).__name__}",
            expected="a mapping, such as {'prompt_group_sizes': [8, 6]}",
            reason="what the trainer knows of the step is found by its name",
            remedy="pass what the rollout step returned beside the samples, or None",
        )
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
    lengths = response_lengths(field("response_length"), masks)
    check_tokens(tokens, lengths)
    check_lengths("loss_mask", masks, lengths)
    columns: dict[str, Any] = {
        "tokens": Ragged.from_rows(tokens, torch.int64),
        "response_lengths": torch.tensor(lengths, dtype=torch.int64),
        "rewards": found["rewards"],
        "raw_reward": found["raw_reward"],
        "truncated": found["truncated"],
        "sample_indices": integers_or_list(field("index")),
        "rollout_ids": found["rollout_ids"],
        "loss_masks": Ragged.from_rows(final_masks(masks, lengths, found["silenced"]), torch.uint8),
        "rollout_mask_sums": found["rollout_mask_sums"],
        "weights": found["weights"],
        "trained": found["trained"],
    }
    columns |= optional_columns(field, tokens, lengths)
    adapters, step = adapter_columns(field, metadata)
    columns |= adapters
    step |= {name: metadata[name] for name in STEP_FIELDS if metadata.get(name) is not None and name not in step}
    return TrainData(columns, step)


def _truncated(result: NormalizedRewards) -> Tensor:
    truncated = result.columns.truncated
    return torch.zeros_like(result.index.row_rollout) if truncated is None else truncated.to(torch.int64)


def _rollout_ids(result: NormalizedRewards) -> Tensor:
    """int64 ``[N]``, one id per rollout: the given ones where these are integers and name each rollout once."""
    index = result.index
    column = index.rollout_column
    if column is not None and column.labels is None and column.missing is None:
        ids = column.codes[index.first_row]
        if len(torch.unique(ids)) == len(ids):
            return column.codes
    return index.row_rollout
