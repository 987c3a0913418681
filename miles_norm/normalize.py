"""The hall: samples or columns in, ``NormalizedRewards`` out, every step's result kept so that it can be explained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from miles_norm.advantages import ESTIMATORS, EstimatorInputs, whitened
from miles_norm.broadcast import rollouts_to_rows, rows_to_tokens
from miles_norm.columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.counting import Exclusion, GroupedRewards, component_statistics, group_rewards, rollout_components
from miles_norm.errors import ConfigError, GroupingError, RewardError, format_rows
from miles_norm.explain import explain_row
from miles_norm.grouping import RolloutIndex, recover_groups
from miles_norm.metrics import result_metrics
from miles_norm.rewards import RolloutRewards, choose_rollout_rewards
from miles_norm.sample_columns import columns_from_samples
from miles_norm.statistics import SegmentStatistics

__all__ = ["NormalizedRewards", "normalize_columns", "normalize_rewards"]

NEARLY_EQUAL = 1e-6
"""A group whose rewards range over less than this share of the largest is reported."""

logger = logging.getLogger("miles_norm")


class NormalizedRewards:
    """What ``normalize_rewards`` found: advantages per row and rollout, and every step on the way to them.

    N rows, R rollouts, G prompt groups; rows are in flattened order.
    """

    def __init__(
        self,
        columns: RolloutColumns,
        config: NormalizationConfig,
        rewards: RolloutRewards,
        grouped: GroupedRewards,
        rollout_advantages: Tensor,
        warnings: tuple[str, ...],
    ) -> None:
        self.columns = columns
        self.config = config
        self.rewards = rewards
        """Which reward speaks for each rollout, and the row values it was chosen from."""
        self.exclusion: Tensor | None = grouped.exclusion
        """int8 ``[R]``: an ``Exclusion`` per rollout; None if every rollout counts."""
        self.statistics: SegmentStatistics = grouped.statistics
        """Statistics of the ``[G]`` prompt groups over their counted rollouts."""
        self.index: RolloutIndex = grouped.index
        """Row to rollout, rollout to group, and what formed the groups."""
        self.rollout_advantages = rollout_advantages
        """float32 ``[R]``; 0 for a rollout that does not count."""
        self.warnings = warnings
        """What deserves a look: guessed groups, siblings that disagree, ids used twice, groups nearly equal."""

    @cached_property
    def advantages(self) -> Tensor:
        """float32 ``[N]``: each row's advantage, that of its rollout; its own reward where rewards pass through."""
        broadcast = rollouts_to_rows(self.rollout_advantages, self.index.row_rollout)
        if self.config.normalizes_groups:
            return broadcast
        own = torch.nan_to_num(self.rewards.row_values, nan=0.0).to(torch.float32)
        if self.exclusion is not None:
            own.masked_fill_(~self._row_counts, 0.0)
        return own if self.columns.padding is None else torch.where(self.columns.padding, broadcast, own)

    @property
    def raw_rewards(self) -> Tensor:
        """float64 ``[N]``: rewards as given, NaN for None."""
        scored = self.columns.scored
        return self.columns.reward if scored is None else self.columns.reward.masked_fill(~scored, torch.nan)

    @property
    def rollout_rewards(self) -> Tensor:
        """float64 ``[R]``: the reward that speaks for each rollout, NaN where none can."""
        return self.rewards.values

    @property
    def groups(self) -> list[list[int]]:
        """Rows of each prompt group."""
        return self.index.groups

    @property
    def mainstream_rows(self) -> Tensor:
        """int64 ``[R]``: the sibling with the most trainable tokens, the first one on a tie."""
        return self.rewards.mainstream

    @cached_property
    def trainable_tokens(self) -> Tensor:
        """int64 ``[N]``: sum of each row's loss mask; 0 for removed, padding, untrained and excluded rows."""
        tokens = self.rewards.row_tokens
        if self.exclusion is not None:
            tokens = tokens.masked_fill(~self._row_counts, 0)
        if not self.config.normalizes_groups and self.rewards.scored is not None:
            tokens = tokens.masked_fill(~self.rewards.scored, 0)
        return tokens

    @cached_property
    def trained_rows(self) -> Tensor:
        """bool ``[N]``: the row has a trainable token."""
        return self.trainable_tokens > 0

    @cached_property
    def counted_rollouts(self) -> Tensor:
        """bool ``[R]``: the rollout enters statistics and denominators."""
        if self.exclusion is None:
            return torch.ones(self.index.num_rollouts, dtype=torch.bool, device=self.columns.reward.device)
        return self.exclusion == Exclusion.COUNTED

    @property
    def _row_counts(self) -> Tensor:
        return self.counted_rollouts[self.index.row_rollout]

    @cached_property
    def incomplete_groups(self) -> list[int]:
        """Prompt groups with fewer rollouts than ``n_samples_per_prompt``, padding aside; empty where that is unset."""
        if self.config.n_samples_per_prompt is None:
            return []
        group = self.index.rollout_group if self.rewards.real is None else self.index.rollout_group[self.rewards.real]
        count = torch.bincount(group, minlength=self.index.num_groups)
        groups: list[int] = torch.nonzero(count < self.config.n_samples_per_prompt)[:, 0].tolist()
        return groups

    def metrics(self) -> dict[str, float]:
        """Flat numbers for a training log, per rollout where a name does not say row."""
        return result_metrics(self)

    def explain(self, row: int) -> str:
        """Why a row got its advantage: the rule that formed its group, who spoke for its rollout, and the arithmetic.

        Raises:
            IndexError: no such row.
        """
        return explain_row(self, row)

    def token_advantages(self, masks: Tensor | Sequence[Any]) -> Tensor | list[Tensor]:
        """Each row's advantage on its own trainable tokens, 0 elsewhere; all 0 for rows that are not trained.

        Args:
            masks: Loss masks: one padded tensor ``[N, T]``, or N ragged lists, arrays or tensors.

        Returns:
            float32 ``[N, T]``, or a list of N tensors.
        """
        return rows_to_tokens(self.advantages.masked_fill(~self.trained_rows, 0.0), masks)

    def __repr__(self) -> str:
        index = self.index
        return (
            f"NormalizedRewards({index.num_rows} rows, {index.num_rollouts} rollouts, {index.num_groups} groups by "
            f"{index.group_source}, {len(self.warnings)} warnings)"
        )


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
    config = config or NormalizationConfig()
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
    config = config or NormalizationConfig()
    if config.device is not None:
        columns = _moved(columns, config.device)
    index, warnings = recover_groups(columns, config, prompt_group_sizes)
    rewards = choose_rollout_rewards(columns, index, config)
    grouped = group_rewards(columns, index, rewards, config)
    advantages = _advantages(columns, rewards, grouped, config)
    found = (*warnings, *rewards.warnings, *_group_warnings(grouped, config))
    for text in found:
        logger.warning(text)
    return NormalizedRewards(columns, config, rewards, grouped, advantages, found)


def _moved(columns: RolloutColumns, device: str) -> RolloutColumns:
    try:
        return columns.to(device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(
            "device",
            got=f"{device!r}: {str(error).splitlines()[0]}",
            expected="a device that this torch can use, such as 'cpu' or 'cuda:0'",
            reason="the columns are moved there before anything is computed",
            remedy="leave device unset to compute where the columns are",
        ) from None


def _advantages(
    columns: RolloutColumns, rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig
) -> Tensor:
    """float32 ``[R]``: the estimator's formula, then the rules that hold for all of them."""
    statistics = grouped.statistics
    if not config.normalizes_groups:
        advantages = rewards.values
    else:
        if config.singleton == "error" and bool((statistics.count == 1).any()):
            raise _singletons(grouped, torch.nonzero(statistics.count == 1)[:, 0].tolist())
        advantages = _estimate(columns, rewards, grouped, config)
    counted = grouped.counted
    if counted is not None:
        advantages = advantages.masked_fill(~counted, 0.0)
    narrow = advantages.to(torch.float32)
    finite = torch.isfinite(narrow)
    if not bool(finite.all()):
        raise _too_large(advantages, ~finite, grouped.index)
    return narrow


def _estimate(
    columns: RolloutColumns, rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig
) -> Tensor:
    """float64 ``[R]``: the group stage, and whitening over the batch where it is asked for."""
    index, statistics = grouped.index, grouped.statistics
    estimator = ESTIMATORS[config.advantage_estimator]
    inputs = _inputs(columns, rewards, grouped, config)
    try:
        advantages = estimator.compute(inputs)
    except (RewardError, GroupingError) as error:
        raise _with_ids(error, index) from None
    if estimator.zero_where_equal:
        advantages = advantages.masked_fill(statistics.equal[index.rollout_group], 0.0)
    if config.singleton == "raw":
        advantages = torch.where((statistics.count == 1)[index.rollout_group], rewards.values, advantages)
    if config.options.whitening == "none":
        return advantages
    return whitened(
        advantages,
        inputs.counted,
        tokens=inputs.tokens if config.options.whitening == "token" else None,
        shift=config.options.whitening_shift,
        ddof=config.std_ddof,
        std_epsilon=config.std_epsilon,
    )


def _inputs(
    columns: RolloutColumns, rewards: RolloutRewards, grouped: GroupedRewards, config: NormalizationConfig
) -> EstimatorInputs:
    counted = grouped.counted
    components = {
        name: (component, component_statistics(component, grouped, config))
        for name, component in rollout_components(columns, rewards).items()
    }
    return EstimatorInputs(
        rewards=rewards.values,
        group=grouped.index.rollout_group,
        statistics=grouped.statistics,
        members=grouped.members,
        row_tokens=rewards.row_tokens,
        row_rollout=grouped.index.row_rollout,
        given_counted=counted,
        components=components,
        config=config,
    )


def _with_ids(error: RewardError | GroupingError, index: RolloutIndex) -> RewardError | GroupingError:
    """An estimator numbers rollouts and groups; users know them by their ids and rows."""
    numbers = error.rows
    if isinstance(error, RewardError):
        mask = torch.zeros(index.num_rollouts, dtype=torch.bool, device=index.row_rollout.device)
        mask[list(numbers)] = True
        rows = torch.nonzero(mask[index.row_rollout])[:, 0].tolist()
        ids = [index.rollout_ids[number] for number in numbers]
        subject = f"reward of {format_rows(rows)} ({format_rows(ids, 'rollout')})"
    else:
        rows = []
        subject = format_rows([index.group_ids[number] for number in numbers], "prompt group")
    return type(error)(
        subject, got=error.got, expected=error.expected, reason=error.reason, remedy=error.remedy, rows=rows
    )


def _too_large(advantages: Tensor, rollouts: Tensor, index: RolloutIndex) -> RewardError:
    """Rewards that fit float32 while their distance from the baseline, or their sum, does not."""
    rows = torch.nonzero(rollouts[index.row_rollout])[:, 0].tolist()
    return RewardError(
        f"advantage of {format_rows(rows)}",
        got=", ".join(f"{value:g}" for value in advantages[rollouts][:10].tolist()),
        expected=f"a magnitude of at most {torch.finfo(torch.float32).max:.6g}",
        reason="advantages are float32 and would become infinite",
        remedy="rescale the rewards",
        rows=rows,
    )


def _singletons(grouped: GroupedRewards, groups: list[int]) -> GroupingError:
    ids = grouped.index.group_ids
    return GroupingError(
        format_rows([ids[group] for group in groups], "prompt group"),
        got="one counted rollout each",
        expected="at least two (singleton is 'error')",
        reason="a lone rollout has nothing to be compared with",
        remedy="sample more rollouts per prompt, or set singleton to 'zero' or 'raw'",
    )


def _group_warnings(grouped: GroupedRewards, config: NormalizationConfig) -> list[str]:
    statistics, index = grouped.statistics, grouped.index
    warnings = []
    nearly = (statistics.range <= statistics.largest * NEARLY_EQUAL) & ~statistics.equal
    if bool(nearly.any()):
        ids = [index.group_ids[group] for group in torch.nonzero(nearly)[:, 0].tolist()]
        warnings.append(
            f"rewards of {format_rows(ids, 'prompt group', 8)} differ by at most {NEARLY_EQUAL:g} of the largest, "
            "which may be rounding; zero_std_tolerance counts them as equal"
        )
    most = int(statistics.count.max()) if index.num_groups else 0
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
