"""CPU and GPU give the same float32 bits, in every state and for every policy and estimator."""

import itertools
from typing import Any

import pytest
import torch

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns
from miles_norm.advantages import ESTIMATORS
from miles_norm.statistics import segment_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


def columns(rows: int, seed: int, *, shuffled: bool, states: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollouts = max(1, rows * 2 // 5)
    rollout = torch.sort(torch.randint(0, rollouts, (rows,), generator=generator)).values
    # One group of a quarter of the rollouts beside many small ones.
    group = torch.where(rollout < rollouts // 4, 0, rollout // 5)
    reward = torch.randn(rows, generator=generator, dtype=torch.float64)
    reward[::7] = reward[::7].round()
    found = {"group": group, "rollout": rollout, "reward": reward}
    found["trainable_tokens"] = torch.randint(0, 40, (rows,), generator=generator)
    if states:
        found |= {name: torch.rand(rows, generator=generator) < 0.15 for name in STATES}
        found["scored"] = ~found["scored"]
        found["adapter"] = group % 2
    if shuffled:
        order = torch.randperm(rows, generator=generator)
        found = {name: column[order] for name, column in found.items()}
    return found


def check(given: dict[str, torch.Tensor], config: NormalizationConfig) -> None:
    cpu = normalize_columns(RolloutColumns(**given), config)
    gpu = normalize_columns(RolloutColumns(**{name: column.cuda() for name, column in given.items()}), config)
    assert gpu.advantages.is_cuda
    for name in ("advantages", "rollout_advantages"):
        assert torch.equal(getattr(cpu, name).view(torch.int32), getattr(gpu, name).cpu().view(torch.int32)), name
    assert torch.equal(cpu.rollout_rewards.view(torch.int64), gpu.rollout_rewards.cpu().view(torch.int64))
    for name in ("mainstream_rows", "trainable_tokens", "trained_rows", "counted_rollouts"):
        assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu()), name
    assert torch.equal(cpu.index.row_rollout, gpu.index.row_rollout.cpu())
    assert torch.equal(cpu.index.rollout_group, gpu.index.rollout_group.cpu())
    assert cpu.groups == gpu.groups
    assert cpu.warnings == gpu.warnings
    assert cpu.metrics() == pytest.approx(gpu.metrics(), rel=1e-12)
    assert cpu.explain(0) == gpu.explain(0)


@pytest.mark.parametrize(("estimator", "policy"), list(itertools.product(ESTIMATORS, POLICIES)))
@pytest.mark.parametrize("states", [False, True])
def test_estimators_and_policies(estimator: str, policy: str, states: bool) -> None:
    config = NormalizationConfig(advantage_estimator=estimator, rollout_reward=policy, **STRICT if states else {})
    for shuffled in (False, True):
        check(columns(3_000, 1, shuffled=shuffled, states=states), config)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 1_000, 200_000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_sizes(rows: int, shuffled: bool) -> None:
    for seed in range(3):
        check(columns(rows, seed, shuffled=shuffled, states=False), NormalizationConfig())
        check(columns(rows, seed, shuffled=shuffled, states=True), NormalizationConfig(**STRICT))


def test_config_chooses_the_device() -> None:
    given = columns(500, 3, shuffled=True, states=False)
    cpu = normalize_columns(RolloutColumns(**given))
    gpu = normalize_columns(RolloutColumns(**given), NormalizationConfig(device="cuda"))
    assert gpu.advantages.is_cuda
    assert torch.equal(cpu.advantages.view(torch.int32), gpu.advantages.cpu().view(torch.int32))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15, 1e30])
def test_statistics(scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    count = torch.cat([torch.randint(0, 9, (2_000,), generator=generator), torch.tensor([50_000, 0, 1])])
    values = torch.randn(int(count.sum()), generator=generator, dtype=torch.float64) * scale
    cpu, gpu = segment_statistics(values, count), segment_statistics(values.cuda(), count.cuda())
    for name in ("mean", "std", "total", "minimum", "maximum"):
        assert torch.equal(getattr(cpu, name).view(torch.int64), getattr(gpu, name).cpu().view(torch.int64)), name
    assert torch.equal(cpu.equal, gpu.equal.cpu())
