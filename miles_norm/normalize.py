"""The hall: samples or columns in, ``NormalizedRewards`` out, every step's result kept so that it can be explained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from miles_norm.columns.host import host_numbers
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.columns.sample_columns import columns_from_samples
from miles_norm.config import NormalizationConfig
from miles_norm.counting import GroupedRewards, group_rewards
from miles_norm.errors import ConfigError, format_rows
from miles_norm.estimation import rollout_advantages
from miles_norm.grouping import RolloutIndex, recover_groups
from miles_norm.result import Advantages, NormalizedRewards
from miles_norm.rewards import RolloutRewards, choose_rollout_rewards
from miles_norm.statistics import SegmentStatistics

__all__ = ["normalize_columns", "normalize_grouped", "normalize_rewards", "normalize_silently"]

NEARLY_EQUAL = 1e-6
"""A group whose rewards range over less than this share of the largest is reported."""

_DEFAULTS = NormalizationConfig()

logger = logging.getLogger("miles_norm")


def normalize_rewards(
    samples: Iterable[Any],
    config: NormalizationConfig | None = None,
    prompt_group_sizes: Sequence[int] | Tensor | None = None,
) -> NormalizedRewards:
    """Compute one advantage per rollout and give it to every row of the rollout.

    Args:
        samples: Rows, flat or nested (an inner list is a prompt group): ``Sample``, Miles' or slime's own objects, or
            dicts with their field names. They are read, never changed.
        config: Defaults to ``NormalizationConfig()``.
        prompt_group_sizes: Rows per prompt group, as recorded before flattening.

    Raises:
        MilesNormError: see ``miles_norm.errors``; every message names all rows concerned.

    A rollout with reward 1 cut into three rows, and one with reward 0: two observations, not four.

    >>> rows = [{"group_index": 0, "rollout_id": k, "reward": r, "response_length": 8}
    ...         for k, r in ((0, 1.0), (0, 1.0), (0, 1.0), (1, 0.0))]
    >>> normalize_rewards(rows, NormalizationConfig(advantage_estimator="dr_grpo")).advantages.tolist()
    [0.5, 0.5, 0.5, -0.5]
    """
    config = NormalizationConfig.checked(_DEFAULTS if config is None else config)
    return normalize_columns(columns_from_samples(samples, config), config, prompt_group_sizes)


def normalize_columns(
    columns: RolloutColumns,
    config: NormalizationConfig | None = None,
    prompt_group_sizes: Sequence[int] | Tensor | None = None,
) -> NormalizedRewards:
    """``normalize_rewards`` for a batch whose index columns exist already; no sample object is involved.

    >>> columns = RolloutColumns(group=[0, 0, 0], rollout=[0, 0, 1], reward=[4, 4, 0], trainable_tokens=[2, 1, 3])
    >>> normalize_columns(columns, NormalizationConfig(grpo_std_normalization=False)).advantages.tolist()
    [2.0, 2.0, -2.0]
    """
    config = NormalizationConfig.checked(_DEFAULTS if config is None else config)
    return _logged(normalize_silently(RolloutColumns.checked(columns), config, prompt_group_sizes))


def normalize_silently(
    columns: RolloutColumns, config: NormalizationConfig, prompt_group_sizes: Sequence[int] | Tensor | None = None
) -> NormalizedRewards:
    """``normalize_columns`` whose warnings are in the result alone, for who computes many results to compare them."""
    if config.device is not None:
        columns = _moved(columns, config.device)
    index, warnings = recover_groups(columns, config, prompt_group_sizes)
    return _normalized(columns, index, config, warnings)


def normalize_grouped(columns: RolloutColumns, index: RolloutIndex, config: NormalizationConfig) -> NormalizedRewards:
    """``normalize_columns`` for a batch whose groups and rollouts are known."""
    return _logged(_normalized(columns, index, config, ()))


def _logged(result: NormalizedRewards) -> NormalizedRewards:
    for text in result.warnings:
        logger.warning(text)
    return result


def _normalized(
    columns: RolloutColumns, index: RolloutIndex, config: NormalizationConfig, warnings: Sequence[str]
) -> NormalizedRewards:
    rewards = choose_rollout_rewards(columns, index, config)
    grouped = group_rewards(columns, index, rewards, config)
    advantages, moments = rollout_advantages(rewards, grouped, config)
    found = (*columns.notes, *warnings, *rewards.warnings, *_group_warnings(rewards, grouped, config))
    return NormalizedRewards(columns, config, rewards, grouped, Advantages(advantages, moments), found)


def _moved(columns: RolloutColumns, device: str) -> RolloutColumns:
    try:
        return columns.to(device)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch built without CUDA asserts
        raise device_error(device, error) from None


def device_error(device: str, error: Exception) -> ConfigError:
    """What torch says of a device that it cannot use, in one sentence."""
    said = str(error).partition("\n")[0]
    # torch lists every type of device that it was ever ported to, and every backend of an operation.
    got = "no such type of device" if said.startswith("Expected one of") else said.partition(". ")[0].rstrip(".")
    return ConfigError(
        f"device {device!r}",
        got=got,
        expected="a device that torch can use on this machine, such as cpu or cuda:0",
        reason="the columns are moved there before anything is computed",
        remedy="name another device, or leave device unset to compute where the columns are",
    )


def _group_warnings(rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig) -> list[str]:
    statistics, index = grouped.statistics, grouped.index
    warnings = []
    tested = [each for _, each in grouped.components.values()] or [statistics]
    near = [_nearly_equal(each) for each in tested] if config.normalizes_groups else []
    largest = statistics.count.max() if index.num_groups else statistics.count.new_zeros(())
    found = host_numbers(largest, rewards.row_tokens.max(), *(each.sum() for each in near))
    most, tokens = found[:2]
    if any(found[2:]):
        nearly = sorted({group for each in near for group in torch.nonzero(each)[:, 0].tolist()})
        ids = [index.group_ids[group] for group in nearly]
        warnings.append(
            f"rewards of {format_rows(ids, 'prompt group', 8)} differ by at most {NEARLY_EQUAL:g} of the largest, "
            "which may be rounding; zero_std_tolerance counts them as equal"
        )
    if not tokens:
        warnings.append("no row has a trainable token, so nothing will be trained")
    if most == 0:
        warnings.append("no rollout counts: all advantages are 0")
    elif most == 1 and config.normalizes_groups and index.num_rollouts > 1:
        n = config.n_samples_per_prompt
        although = f" although n_samples_per_prompt={n}" if n is not None and n > 1 else ""
        warnings.append(
            f"every group has one rollout{although}, so there is no baseline; "
            f"does {config.group_key!r} name the prompt?"
        )
    return warnings


def _nearly_equal(statistics: SegmentStatistics) -> Tensor:
    """bool ``[G]``: values of the group differ, but by no more than rounding might."""
    return (statistics.range <= statistics.largest * NEARLY_EQUAL) & ~statistics.equal
