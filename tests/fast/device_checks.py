"""What has to be the same on a device as on the CPU: batches in every state, settings of every estimator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns

POLICIES = ("mainstream", "first", "last", "max", "mean", "sum")
STATES = ("scored", "removed", "truncated", "padding")
STRICT: dict[str, Any] = {
    "missing_reward": "exclude",
    "untrained_rollouts": "exclude",
    "truncated_rollouts": "untrain",
    "zero_variance_groups": "drop_from_loss",
    "min_group_size": 2,
    "zero_std_tolerance": 1e-3,
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    **{
        name: {"advantage_estimator": name} for name in ("grpo", "gspo", "dr_grpo", "rloo", "opo", "maxrl", "pass_at_k")
    },
    **{name: {"advantage_estimator": name} for name in ("reinforce_plus_plus_baseline", "ppo", "reinforce_plus_plus")},
    "analytic": {"advantage_estimator": "pass_at_k", "options": {"pass_at_k": "analytic", "k": 2}, "min_group_size": 2},
    "gdpo": {"advantage_estimator": "gdpo", "options": {"gdpo_components": ["one", "two"], "gdpo_partial": True}},
    "whitening": {"options": {"whitening": "token", "whitening_shift": True}},
}


def columns(rows: int, seed: int, *, shuffled: bool, states: bool, estimator: str = "grpo") -> dict[str, Any]:
    """Columns on the CPU; one group of a quarter of the rollouts beside many small ones."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = max(1, rows * 2 // 5)
    rollout = torch.sort(torch.randint(0, rollouts, (rows,), generator=generator)).values
    reward = torch.randn(rows, generator=generator, dtype=torch.float64)
    reward[::7] = reward[::7].round()
    if estimator == "maxrl":
        reward = reward.abs()
    if estimator == "analytic":
        reward = (reward > 0).double()
    found: dict[str, Any] = {
        "group": torch.where(rollout < rollouts // 4, 0, rollout // 5),
        "rollout": rollout,
        "reward": reward,
        "trainable_tokens": torch.randint(0, 40, (rows,), generator=generator),
    }
    if states:
        found |= {name: torch.rand(rows, generator=generator) < 0.15 for name in STATES}
        found["scored"] = ~found["scored"]
        found["adapter"] = found["group"] % 2
    order = torch.randperm(rows, generator=generator) if shuffled else torch.arange(rows)
    found = {name: column[order] for name, column in found.items()}
    if estimator == "gdpo":
        one = torch.randn(rows, generator=generator, dtype=torch.float64)
        found["components"] = {"one": one, "two": (found["reward"] - one).where(one < 1, torch.nan)}
    return found


def settings(estimator: str, policy: str, *, states: bool) -> dict[str, Any]:
    """Settings that fit the estimator; gdpo takes the components of one row."""
    chosen = dict(ESTIMATORS[estimator])
    if estimator != "gdpo" or policy in ("mainstream", "first", "last"):
        chosen["rollout_reward"] = policy
    if estimator == "analytic" and policy in ("mean", "sum"):
        chosen["rollout_reward"] = "max"  # the others are not binary
    return (STRICT if states else {}) | chosen


def on(device: Callable[[Tensor], Tensor], given: dict[str, Any]) -> RolloutColumns:
    """The columns on a device."""
    return RolloutColumns(**{
        name: {key: device(part) for key, part in column.items()} if isinstance(column, dict) else device(column)
        for name, column in given.items()
    })  # fmt: skip


def check(
    given: dict[str, Any],
    config: NormalizationConfig,
    to_device: Callable[[Tensor], Tensor],
    to_host: Callable[[Any], Any],
) -> None:
    """All bits of a result, and everything that it says, are those of the CPU."""
    cpu, there = normalize_columns(RolloutColumns(**given), config), normalize_columns(on(to_device, given), config)
    assert there.advantages.is_cuda
    for name in ("advantages", "rollout_advantages"):
        assert torch.equal(getattr(cpu, name).view(torch.int32), to_host(getattr(there, name)).view(torch.int32)), name
    assert torch.equal(cpu.rollout_rewards.view(torch.int64), to_host(there.rollout_rewards).view(torch.int64))
    for name in ("mainstream_rows", "trainable_tokens", "trained_rows", "counted_rollouts"):
        assert torch.equal(getattr(cpu, name), to_host(getattr(there, name))), name
    assert torch.equal(cpu.index.row_rollout, to_host(there.index.row_rollout))
    assert torch.equal(cpu.index.rollout_group, to_host(there.index.rollout_group))
    assert cpu.groups == there.groups
    assert cpu.warnings == there.warnings
    assert cpu.metrics() == pytest.approx(there.metrics(), rel=1e-12)
    assert cpu.explain(0) == there.explain(0)
