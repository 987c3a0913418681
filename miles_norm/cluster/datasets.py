"""Advantages as a column of a Ray dataset."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from miles_norm.columns import columns_from_fields
from miles_norm.config import NormalizationConfig
from miles_norm.errors import ConfigError, GroupingError, SampleError, format_rows
from miles_norm.normalize import normalize_columns
from miles_norm.streaming import batch_stage

__all__ = ["normalize_batch"]

Array = np.ndarray[Any, Any]


def normalize_batch(
    batch: Mapping[str, Array], config: NormalizationConfig, *, whole_groups: bool = False
) -> dict[str, Array]:
    """Add ``advantage``, ``trained`` and ``rollout_reward`` to a batch of rows: a function for ``Dataset.map_batches``.

    A batch has to hold whole prompt groups. Ray cuts batches by size, so either ``n_samples_per_prompt`` is set, and a
    group that is cut is an error; or the caller makes sure of it: ``dataset.groupby("group_index").map_groups(...)``
    does, with ``whole_groups=True``.

    Args:
        batch: One array per field, as ``map_batches`` hands it over with ``batch_format="numpy"``: ``reward``,
            ``group_index``, ``rollout_id`` or ``index``, ``loss_mask`` or ``response_length``, and what else
            ``normalize_rewards`` reads.
        config: Settings that need one prompt group at a time.
        whole_groups: Every batch holds whole groups, whatever their size.

    Raises:
        ConfigError: nothing says that groups are whole, or settings that need the whole dataset.
        GroupingError: a group with fewer rollouts than ``n_samples_per_prompt``.
        MilesNormError: as ``normalize_rewards``; rows are numbered within the batch.

    >>> batch = {"group_index": np.array([0, 0]), "index": np.array([0, 1]), "reward": np.array([1.0, 0.0]),
    ...          "response_length": np.array([3, 2])}
    >>> normalize_batch(batch, NormalizationConfig(advantage_estimator="dr_grpo", n_samples_per_prompt=2))["advantage"]
    array([ 0.5, -0.5], dtype=float32)
    """
    config = NormalizationConfig.checked(config)
    _check(config, whole_groups)
    if not isinstance(batch, Mapping):
        raise SampleError(
            "batch",
            got=f"a value of type {type(batch).__name__}",
            expected="one array per field, by name",
            reason="groups, rollouts and rewards are found by these names",
            remedy="call map_batches with batch_format='numpy'",
        )
    columns = columns_from_fields(cache(lambda name: _listed(batch.get(name))), _rows(batch), config)
    result = normalize_columns(columns, config)
    if not whole_groups and result.incomplete_groups:
        ids = [result.index.group_ids[group] for group in result.incomplete_groups]
        raise GroupingError(
            format_rows(ids, "prompt group"),
            got=f"fewer than n_samples_per_prompt={config.n_samples_per_prompt} rollouts in the batch",
            expected="batches of whole prompt groups",
            reason="a group that is cut into two batches has two baselines",
            remedy="use dataset.groupby(group_key).map_groups with whole_groups=True, or batches that end with a group",
        )
    rewards = result.rollout_rewards[result.index.row_rollout]
    added = {"advantage": result.advantages, "trained": result.trained_rows, "rollout_reward": rewards}
    return {**batch, **{name: column.cpu().numpy() for name, column in added.items()}}


def _rows(batch: Mapping[str, Array]) -> int:
    return len(next(iter(batch.values()), ()))


def _listed(column: Array | None) -> list[Any] | None:
    """Python's numbers and strings; one array per row where a row has several values."""
    if column is None:
        return None
    return list(column) if column.ndim > 1 or column.dtype == object else column.tolist()


def _check(config: NormalizationConfig, whole_groups: bool) -> None:
    setting = batch_stage(config)
    if setting is not None:
        raise ConfigError(
            "NormalizationConfig of a dataset",
            got=setting,
            expected="settings that need no more than one prompt group",
            reason="it divides by a deviation over all rows, and a batch has some of them",
            remedy="choose other settings, or normalize_on_cluster, which sees the index columns of all rows",
        )
    if config.n_samples_per_prompt is None and not whole_groups:
        raise ConfigError(
            "NormalizationConfig of a dataset",
            got="no n_samples_per_prompt, and whole_groups is False",
            expected="a way to tell whether a batch holds whole prompt groups",
            reason="a group that is cut into two batches has two baselines",
            remedy="set n_samples_per_prompt, or group the dataset by prompt and pass whole_groups=True",
        )
