"""Settings of losses and trainers that are refused: clips, bounds, kinds, sizes; and configs of another type."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from miles_norm import (
    FilterConfig,
    LossConfig,
    NormalizationConfig,
    RolloutColumns,
    UpdateConfig,
    loss_weights,
    normalize_columns,
    plan_updates,
)
from miles_norm.errors import ConfigError
from miles_norm.loss import (
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    loss_factor,
    mask_loss_weights,
    row_sequences,
    truncated_importance_sampling,
    update_masses,
)

X, MASK = torch.full((2, 3), -0.5), torch.tensor([[1, 1, 0], [1, 0, 0]])
ROWS = row_sequences(MASK)
# Rollouts "a" on rows 0 and 1, "b" and "c" on one row each.
RESULT = normalize_columns(
    RolloutColumns(group=[0] * 4, rollout=["a", "a", "b", "c"], reward=[1, 1, 0, 1], trainable_tokens=[2, 1, 2, 1])
)
PLAN = plan_updates(RESULT, UpdateConfig(rollouts_per_update=2, max_tokens_per_gpu=9))


NO_PAIRS: list[Any] = [
    None,
    0.2,
    (),
    (0.2,),
    (0.1, 0.2, 0.3),
    ("a", "b"),
    "ab",
    (True, False),
    (math.nan, 0.2),
    (math.inf, math.inf),
    (0.2, math.inf),
    (10**400, 0.2),
    (1e300, 0.2),
    (-0.1, 0.2),
    (None, None),
    (torch.tensor(0.2), torch.tensor(0.2)),
    (Decimal("0.2"), Decimal("0.2")),
    {0.2, 0.3},
    {"low": 0.2, "high": 0.3},
]


@pytest.mark.parametrize("clip", NO_PAIRS, ids=lambda value: repr(value)[:40])
def test_a_clip_that_is_no_pair_of_distances(clip: Any) -> None:
    calls = (
        lambda: clipped_loss(X, X, X, MASK, clip=clip),
        lambda: cispo_loss(X, X, X, MASK, clip=clip),
        lambda: gspo_loss(X, X, X, MASK, ROWS, clip=clip),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"^clip\n +got: .*\n +expected: two finite distances from 1"):
            call()


@pytest.mark.parametrize("clip", [[0.2, 0.25], (np.float64(0.2), np.float64(0.25)), (Fraction(1, 5), Fraction(1, 4))])
def test_a_pair_of_any_numbers_is_a_clip(clip: Any) -> None:
    ratios = torch.tensor([1.5, 0.5])
    given = (ratios.log(), torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2))
    assert clipped_loss(*given, clip=clip)[0].tolist() == pytest.approx([-1.25, 0.8])


@pytest.mark.parametrize(
    "dual", ["3", math.inf, math.nan, 1, True, (3.0,), -2.0, torch.tensor(3.0)], ids=lambda value: repr(value)[:40]
)
def test_a_second_clip_that_is_none(dual: Any) -> None:
    with pytest.raises(ConfigError, match=r"^dual_clip\n.*\n +expected: a finite number above 1, or None"):
        clipped_loss(X, X, X, MASK, dual_clip=dual)


@pytest.mark.parametrize(
    "bounds",
    [*(pair for pair in NO_PAIRS if pair != (0.2, math.inf)), (2.0, 1.0), (math.inf, math.inf)],
    ids=lambda value: repr(value)[:40],
)
def test_bounds_that_are_no_pair_of_weights(bounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^bounds\n.*\n +expected: a smallest and a largest weight"):
        truncated_importance_sampling(X, X, X, MASK, bounds=bounds)


def test_the_largest_weight_may_be_infinite() -> None:
    given = (torch.ones(2), torch.tensor([9.0, 0.1]).log(), torch.zeros(2), torch.ones(2))
    assert truncated_importance_sampling(*given, bounds=(0.5, math.inf))[0].tolist() == pytest.approx([9.0, 0.5])


@pytest.mark.parametrize("kind", [None, 3, "K3", ("k3",), np.array(["k1", "k2"])], ids=lambda value: repr(value)[:40])
def test_a_kind_of_kl_estimate_that_is_none(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"^kind of KL estimate\n"):
        kl_loss(X, X, MASK, kind=kind)


NO_SIZES: list[Any] = [2.5, 2.0, math.nan, "2", True, 0, -1, (2,), torch.tensor(2), np.float64(2.0), 2**63]


@pytest.mark.parametrize("size", [None, *NO_SIZES], ids=lambda value: repr(value)[:40])
@pytest.mark.parametrize("name", ["data_parallel", "context_parallel", "micro_batches"])
def test_sizes_that_are_none(name: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} of loss_factor\n.*\n +expected: a whole number, at least 1"):
        loss_factor("megatron", **{name: size})


@pytest.mark.parametrize("size", NO_SIZES, ids=lambda value: repr(value)[:40])
def test_reported_tokens_that_are_no_number(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^reported_tokens of loss_factor\n(.*\n)+.*int\(tensor\)"):
        loss_factor("megatron_per_token", reported_tokens=size)


@pytest.mark.parametrize(
    "trainer", [None, 3, "DDP", ("ddp",), np.array(["ddp", "fsdp"])], ids=lambda value: repr(value)[:40]
)
def test_trainers_that_are_none(trainer: Any) -> None:
    with pytest.raises(ConfigError, match=r"^trainer of loss_factor\n.*\n +expected: ddp, fsdp"):
        loss_factor(trainer)


def test_sizes_may_be_numpys() -> None:
    factor = loss_factor("megatron", data_parallel=np.int64(2), micro_batches=np.int32(3))  # type: ignore[arg-type]
    assert (factor, type(factor)) == (6, int)


@pytest.mark.parametrize(
    "config", [UpdateConfig(), NormalizationConfig(), {}, {"divisor": "rollouts"}, "rollout_mean", 0]
)
def test_a_loss_config_that_is_none(config: Any) -> None:
    calls = (
        lambda: loss_weights(RESULT, config),
        lambda: update_masses(PLAN, config),
        lambda: mask_loss_weights([1, 2], [0, 1], config),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=rf"^config\n.*of type {type(config).__name__}\n +expected: a LossConfig"):
            call()


@pytest.mark.parametrize("config", [LossConfig(), FilterConfig(), {}, {"unit": "rows"}, 0])
def test_an_update_config_that_is_none(config: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^config\n.*of type {type(config).__name__}\n +expected: an UpdateConfig\n"
    ):
        plan_updates(RESULT, config)


@pytest.mark.parametrize("step", ["1", 1.0, None, True, -1], ids=lambda value: repr(value)[:40])
def test_a_step_that_is_none(step: Any) -> None:
    with pytest.raises(ConfigError, match=r"^step of plan_updates\n"):
        plan_updates(RESULT, step=step)
