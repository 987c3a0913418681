"""The estimators: advantages and loss weights as miles_norm computes them, times the scores of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from cutting import Rows
from race import MAX_TOKENS
from torch import Tensor

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    NormalizedRewards,
    RolloutColumns,
    UpdateConfig,
    loss_weights,
    normalize_columns,
    plan_updates,
)
from miles_norm.audit.baselines import baseline_advantages

ADVANTAGES: tuple[Literal["grpo", "dr_grpo", "rloo"], ...] = ("grpo", "dr_grpo", "rloo")
PLANS = ("whole batch", "whole rollouts", "rows")
"""What an update holds: the batch; a part of its rollouts; as many rows as that, whosever they are."""


@dataclass(frozen=True)
class Batches:
    """Many independent batches of ``rollouts`` rollouts each, one after the other."""

    group: Tensor
    """int64 ``[R]``: prompt group of each rollout, unlike those of other batches."""
    reward: Tensor
    """float64 ``[R]``."""
    rows: Rows
    rollouts: int
    update_size: int
    """Rollouts in an update of whole rollouts, rows in one of rows."""

    @property
    def row_batch(self) -> Tensor:
        """Batch of each row ``[N]``."""
        return self.rows.rollout // self.rollouts

    @property
    def number(self) -> int:
        """How many batches there are."""
        return len(self.reward) // self.rollouts

    def columns(self) -> RolloutColumns:
        """What the library reads."""
        rollout = self.rows.rollout
        return RolloutColumns(
            group=self.group[rollout], rollout=rollout, reward=self.reward[rollout], trainable_tokens=self.rows.tokens
        )


@dataclass(frozen=True)
class Estimator:
    """One way to weigh the rows of an update."""

    name: str
    row_advantages: bool
    """Whether each row counts as a rollout in the reward statistics."""
    aggregation: str
    divisor: str = "rollouts"

    @property
    def row_level(self) -> bool:
        """Whether rows are what it averages over, in the statistics or in the loss."""
        return self.row_advantages or self.aggregation == "sample_mean"

    def config(self, rollouts: int) -> LossConfig:
        """Settings for updates that hold ``rollouts`` rollouts when nothing is cut."""
        settings: dict[str, Any] = {"aggregation": self.aggregation, "divisor": self.divisor}
        if self.divisor == "nominal_rollouts":
            settings["nominal_rollouts"] = rollouts
        if self.aggregation == "constant":
            settings["max_tokens"] = MAX_TOKENS
        return LossConfig(**settings)

    def unit(self, expected_tokens: float) -> float:
        """What its gradient is multiplied by, so that uncut rollouts of equal length would give the true one."""
        return MAX_TOKENS if self.aggregation == "constant" else expected_tokens


ESTIMATORS = (
    Estimator("row advantages, sample_mean", True, "sample_mean"),
    Estimator("row advantages, token_mean", True, "token_mean"),
    Estimator("sample_mean", False, "sample_mean"),
    Estimator("rollout_row_mean", False, "rollout_row_mean"),
    Estimator("rollout_mean / trained_rows", False, "rollout_mean", "trained_rows"),
    Estimator("rollout_mean / rollouts", False, "rollout_mean"),
    Estimator("rollout_mean / nominal_rollouts", False, "rollout_mean", "nominal_rollouts"),
    Estimator("token_mean", False, "token_mean"),
    Estimator("constant", False, "constant"),
)


@dataclass(frozen=True)
class Measured:
    """Gradients of one estimator."""

    plan: str
    advantage: str
    estimator: Estimator
    gradients: Tensor
    """float64 ``[B, 6]``: of each batch, in the mean over its updates, all at the policy that sampled it."""


def gradients(batches: Batches, expected_tokens: float, draw: torch.Generator) -> Iterator[Measured]:
    """Gradients of all estimators under all plans."""
    columns = batches.columns()
    results = {name: normalize_columns(columns, NormalizationConfig(advantage_estimator=name)) for name in ADVANTAGES}
    advantages = {
        (name, row_level): baseline_advantages(result, "rows") if row_level else result.advantages
        for name, result in results.items()
        for row_level in (False, True)
    }
    for plan in PLANS:
        weights = _weights(plan, batches, results["dr_grpo"], draw)
        for (name, row_level), advantage in advantages.items():
            for estimator, weight in weights.items():
                if estimator.row_advantages == row_level:
                    total = batches.rows.scores.new_zeros(batches.number, batches.rows.scores.shape[-1])
                    total.index_add_(0, batches.row_batch, batches.rows.scores * (weight * advantage)[:, None])
                    yield Measured(plan, name, estimator, total * estimator.unit(expected_tokens))


def _weights(plan: str, batches: Batches, result: NormalizedRewards, draw: torch.Generator) -> dict[Estimator, Tensor]:
    """Weight of each row ``[N]`` by each estimator, divided by the number of updates of its batch."""
    size = batches.rollouts if plan == "whole batch" else batches.update_size
    configs = {estimator: estimator.config(size) for estimator in ESTIMATORS}
    if plan == "rows":
        by_config = _weights_of_row_updates(batches, set(configs.values()), draw)
    else:
        # Rollouts are in the order of their batches, and a batch is a whole number of updates.
        updates = plan_updates(result, UpdateConfig(rollouts_per_update=size))
        share = size / batches.rollouts
        by_config = {config: loss_weights(result, config, updates) * share for config in set(configs.values())}
    return {estimator: by_config[config] for estimator, config in configs.items()}


def _weights_of_row_updates(
    batches: Batches, configs: set[LossConfig], draw: torch.Generator
) -> dict[LossConfig, Tensor]:
    """Each batch on its own: its rows in random order, and cut down to whole updates."""
    columns = batches.columns()
    weights = {config: torch.zeros(len(columns), dtype=torch.float64) for config in configs}
    sizes = torch.bincount(batches.row_batch).tolist()
    for number, rows in enumerate(torch.arange(len(columns)).split(sizes)):
        order = rows[torch.randperm(len(rows), generator=draw)]
        result = normalize_columns(columns.select(order), NormalizationConfig(advantage_estimator="dr_grpo"))
        settings = UpdateConfig(unit="rows", rows_per_update=batches.update_size, seed=number)
        updates = plan_updates(result, settings)
        for config, weight in weights.items():
            weight[order] = loss_weights(result, config, updates) / updates.num_updates
    return weights
