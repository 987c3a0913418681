"""On a device: the bits of the CPU, a number of launches that the rows do not change, and a host that does not wait."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_checks import ESTIMATORS, POLICIES, STRICT, check, columns, on, settings
from pretended_device import Pretended, off_device, on_device, watched, without_waits
from torch import Tensor

from miles_norm import NormalizationConfig, RolloutColumns, TrainData, normalize_columns
from miles_norm.broadcast import rollouts_to_rows, rows_to_tokens
from miles_norm.statistics import segment_statistics
from miles_norm.train_data import Ragged


@pytest.fixture(autouse=True)
def fixture_device() -> Any:
    """Factories such as ``torch.zeros(..., device=...)`` know the pretended device."""
    with watched() as seen:
        yield seen


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x.any()), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (torch.nonzero, "nonzero"),
        (torch.unique, "_unique2"),
        (lambda x: torch.repeat_interleave(x, x.long()), "repeat_interleave"),
        (lambda x: torch.bincount(x.long()), "bincount"),
        (lambda x: x[x > 0], "index with a mask"),
        (lambda x: x.cpu(), "to the CPU"),
        (lambda x: x.to("cpu"), "to the CPU"),
    ],
)
def test_waits_are_seen(wait: Callable[[Tensor], object], name: str) -> None:
    x = on_device(torch.ones(3))
    with watched() as seen:
        wait(x)
    assert seen.waits == {name: 1}


def test_launches_are_seen_and_values_stay_there() -> None:
    x = on_device(torch.arange(4.0))
    with watched() as seen:
        y = (x + torch.zeros(4, device=x.device)).view(2, 2)[0].mul_(2)
    assert isinstance(y, Pretended)
    assert (seen.launches, seen.waits) == ({"zeros": 1, "add": 1, "mul_": 1}, {})
    assert off_device(y).tolist() == [0.0, 2.0]
    with pytest.raises(RuntimeError, match="a tensor on the CPU beside one on the device"):
        x + torch.ones(4)
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()


@pytest.mark.parametrize(("estimator", "policy"), list(itertools.product(ESTIMATORS, POLICIES)))
@pytest.mark.parametrize("states", [False, True])
def test_bits_of_the_cpu(estimator: str, policy: str, states: bool) -> None:
    config = NormalizationConfig(**settings(estimator, policy, states=states))
    given = columns(150, 1, shuffled=states, states=states, estimator=estimator)
    check(given, config, on_device, off_device)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("shuffled", [False, True])
def test_sizes(rows: int, shuffled: bool) -> None:
    check(columns(rows, 2, shuffled=shuffled, states=False), NormalizationConfig(), on_device, off_device)
    check(columns(rows, 2, shuffled=shuffled, states=True), NormalizationConfig(**STRICT), on_device, off_device)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("longest", [None, 700])
def test_statistics(scale: float, longest: int | None) -> None:
    generator = torch.Generator().manual_seed(4)
    count = torch.cat([torch.randint(0, 9, (50,), generator=generator), torch.tensor([700, 0, 1, 0])])
    values = torch.randn(int(count.sum()), generator=generator, dtype=torch.float64) * scale
    cpu, there = (
        segment_statistics(values, count),
        segment_statistics(on_device(values), on_device(count), longest=longest),
    )
    for name in ("mean", "std", "total", "minimum", "maximum"):
        assert torch.equal(getattr(cpu, name).view(torch.int64), off_device(getattr(there, name)).view(torch.int64)), (
            name
        )
    assert torch.equal(cpu.equal, off_device(there.equal))
    nothing = segment_statistics(on_device(values[:0]), on_device(torch.zeros(2, dtype=torch.int64)))
    assert off_device(nothing.equal).tolist() == [True, True]


def groups_of_eight(rollouts: int, *, shuffled: bool) -> dict[str, Any]:
    """Rows of groups that all have eight rollouts."""
    rollout = torch.arange(rollouts).repeat_interleave(torch.arange(rollouts) % 3 + 1)
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(0))
    order = order if shuffled else torch.arange(len(rollout))
    given = {"group": rollout // 8, "rollout": rollout, "reward": (rollout % 5) / 4, "trainable_tokens": rollout % 7}
    return {name: column[order] for name, column in given.items()}


# Launches, and how often the host has to know something before it goes on: how many rollouts and groups there are,
# whether a row is wrong, what deserves a warning.
@pytest.mark.parametrize(("shuffled", "launches", "waits"), [(False, 140, 12), (True, 190, 15)])
def test_launches_and_waits_do_not_grow_with_the_batch(shuffled: bool, launches: int, waits: int) -> None:
    found = []
    for rollouts in (64, 64, 4096):
        given = {name: on_device(column) for name, column in groups_of_eight(rollouts, shuffled=shuffled).items()}
        with watched() as seen:
            assert normalize_columns(RolloutColumns(**given)).advantages.is_cuda
        found.append(seen)
    assert found[0].launches == found[1].launches == found[2].launches
    assert found[0].waits == found[1].waits == found[2].waits
    assert found[0].launches.total() <= launches
    assert found[0].waits.total() <= waits


def test_statistics_take_as_many_steps_as_the_longest_segment_asks_for() -> None:
    launches = []
    for longest in (8, 16, 4096):
        values, count = on_device(torch.rand(4096, dtype=torch.float64)), on_device(torch.full((512,), 8))
        with watched() as seen:
            segment_statistics(values, count, longest=longest)
        assert seen.waits == {}
        launches.append(seen.launches.total())
    # Two trees, four launches a step: from 3 steps to 4 and to 12.
    assert [launches[1] - launches[0], launches[2] - launches[0]] == [8, 72]


def test_rows_tokens_and_batches_never_wait() -> None:
    result = normalize_columns(on(on_device, groups_of_eight(16, shuffled=False)))
    rows = result.index.num_rows
    mask = on_device(torch.ones(rows, 5, dtype=torch.uint8))
    without_waits(lambda: rollouts_to_rows(result.rollout_advantages, result.index.row_rollout), 1)
    without_waits(lambda: result.token_advantages(mask), 8)
    without_waits(lambda: rows_to_tokens(result.advantages, mask), 4)
    data = TrainData({
        "tokens": Ragged(torch.arange(12), [0, 5, 5, 12]),
        "response_lengths": torch.tensor([2, 0, 4]),
        "loss_masks": Ragged(torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.uint8), [0, 2, 2, 6]),
        "rollout_log_probs": Ragged(torch.rand(6), [0, 2, 2, 6]),
        "rewards": torch.tensor([0.5, 0.0, -0.5]),
        "weights": torch.rand(3, dtype=torch.float64),
    })  # fmt: skip
    there = TrainData.__new__(TrainData)
    there.step, there.columns = {}, {name: moved(column) for name, column in data.columns.items()}
    without_waits(there.packed_batch, 40)
    for name, field in data.packed_batch().items():
        assert torch.equal(off_device(there.packed_batch()[name]), field), name


def moved(column: Any) -> Any:
    return column.to(torch.device("cuda", 0)) if isinstance(column, Ragged) else on_device(column)
