"""CPU and GPU give the same float32 bits, in every state and for every policy and estimator."""

import itertools

import pytest
import torch
from device_checks import ESTIMATORS, POLICIES, STRICT, check, columns, settings
from torch import Tensor

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns
from miles_norm.statistics import segment_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("estimator", "policy"), list(itertools.product(ESTIMATORS, POLICIES)))
@pytest.mark.parametrize("states", [False, True])
def test_estimators_and_policies(estimator: str, policy: str, states: bool) -> None:
    config = NormalizationConfig(**settings(estimator, policy, states=states))
    for shuffled in (False, True):
        given = columns(3_000, 1, shuffled=shuffled, states=states, estimator=estimator)
        check(given, config, Tensor.cuda, Tensor.cpu)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 1_000, 200_000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_sizes(rows: int, shuffled: bool) -> None:
    for seed in range(3):
        check(columns(rows, seed, shuffled=shuffled, states=False), NormalizationConfig(), Tensor.cuda, Tensor.cpu)
        given = columns(rows, seed, shuffled=shuffled, states=True)
        check(given, NormalizationConfig(**STRICT), Tensor.cuda, Tensor.cpu)


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
    cpu = segment_statistics(values, count)
    for longest in (None, 50_000):
        gpu = segment_statistics(values.cuda(), count.cuda(), longest=longest)
        for name in ("mean", "std", "total", "minimum", "maximum"):
            assert torch.equal(getattr(cpu, name).view(torch.int64), getattr(gpu, name).cpu().view(torch.int64)), name
        assert torch.equal(cpu.equal, gpu.equal.cpu())
