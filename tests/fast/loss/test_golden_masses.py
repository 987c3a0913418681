"""Golden masses: what Agent Lightning computes, and the numbers of the divisor question."""

from typing import Any

import pytest
import torch
from golden_dumps import AGENT_LIGHTNING

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    RolloutColumns,
    UpdateConfig,
    loss_weights,
    normalize_columns,
    plan_updates,
)
from miles_norm.loss import update_masses
from miles_norm.result import NormalizedRewards


@pytest.mark.parametrize("form", AGENT_LIGHTNING)
def test_masses_of_agent_lightning(form: str) -> None:
    """It divides by rows and computes in float32."""
    golden: dict[str, Any] = AGENT_LIGHTNING[form]
    tokens = golden["response_mask_sums"]
    columns = RolloutColumns(
        group=golden["data_id_list"],
        rollout=golden["rollout_id_list"],
        reward=[0.0] * len(tokens),
        trainable_tokens=tokens,
    )
    result = normalize_columns(columns)
    weights = loss_weights(result, LossConfig(divisor="trained_rows"))
    mass = weights * result.trainable_tokens
    assert weights.tolist() == pytest.approx(golden["row_weight_per_token"], rel=1e-6)
    assert mass.tolist() == pytest.approx(golden["row_mass"], rel=1e-6)
    of_rollouts = torch.zeros(8, dtype=torch.float64).index_add_(0, result.index.row_rollout, mass)
    by_id = dict(zip(result.index.rollout_ids, of_rollouts.tolist(), strict=True))
    assert by_id == pytest.approx(golden["rollout_mass"], rel=1e-6)
    # 8 rollouts on 25 rows: 0.32; on 15 rows: 8/15.
    assert float(mass.sum()) == pytest.approx(golden["total_mass"], rel=1e-6)
    assert float(mass.sum()) == pytest.approx(8 / len(tokens), rel=1e-12)
    assert float((loss_weights(result) * result.trainable_tokens).sum()) == pytest.approx(1.0, rel=1e-12)


def batch(rollouts: list[int], tokens: list[int]) -> NormalizedRewards:
    n = len(rollouts)
    return normalize_columns(
        RolloutColumns(
            group=[0] * n, rollout=rollouts, reward=[float(r % 2) for r in rollouts], trainable_tokens=tokens
        ),
        NormalizationConfig(),
    )


def masses(result: NormalizedRewards, config: LossConfig) -> list[float]:
    mass = loss_weights(result, config) * result.trainable_tokens
    return mass.new_zeros(result.index.num_rollouts).index_add_(0, result.index.row_rollout, mass).tolist()


BY_ROWS = LossConfig(divisor="trained_rows")


def test_six_rows_of_three_rollouts() -> None:
    # A 50 + 100 tokens, B 30 three times, C 40.
    result = batch([0, 0, 1, 1, 1, 2], [50, 100, 30, 30, 30, 40])
    assert masses(result, LossConfig()) == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert masses(result, BY_ROWS) == pytest.approx([1 / 6, 1 / 6, 1 / 6])
    assert sum(masses(result, LossConfig())) == pytest.approx(1.0)
    assert sum(masses(result, BY_ROWS)) == pytest.approx(0.5)


@pytest.mark.parametrize(("fan_out", "each"), [(1, 1 / 2), (2, 1 / 3)])
def test_mass_times_update_units_is_two_while_rows_fill_mini_batches(fan_out: int, each: float) -> None:
    """Two rollouts, the first on one row or on two. A row is an update unit: mass 2/N times N units is R = 2."""
    rollouts = [0] * fan_out + [1]
    result = batch(rollouts, [10] * len(rollouts))
    assert masses(result, BY_ROWS) == pytest.approx([each, each])
    assert sum(masses(result, BY_ROWS)) * len(rollouts) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("settings", "updates", "by_rollouts", "by_rows"),
    [
        # Two to an update: rollouts 0 and 1 on rows 2 + 3, rollout 2 on one row.
        ({"rollouts_per_update": 2}, 2, [1.0, 1.0], [2 / 5, 1.0]),
        ({"rollouts_per_update": 3}, 1, [1.0], [3 / 6]),
        # By rows, in whole mini-batches of three: rollouts 0 and 1 share the first, 1 and 2 the second.
        ({"unit": "rows", "rows_per_update": 3}, 2, [1.0, 1.0], [2 / 3, 2 / 3]),
        # One update of all six rows is all that the cap allows.
        ({"unit": "rows", "rows_per_update": 6, "max_updates": 1}, 1, [1.0], [3 / 6]),
    ],
)
def test_masses_of_updates(
    settings: dict[str, Any], updates: int, by_rollouts: list[float], by_rows: list[float]
) -> None:
    plan = plan_updates(batch([0, 0, 1, 1, 1, 2], [50, 100, 30, 30, 30, 40]), UpdateConfig(**settings))
    assert plan.num_updates == updates
    assert update_masses(plan).tolist() == pytest.approx(by_rollouts)
    assert update_masses(plan, BY_ROWS).tolist() == pytest.approx(by_rows)


def test_the_nominal_divisor_equalizes_a_smaller_last_update() -> None:
    # Three rollouts, two to an update: the last one alone weighs 1, or 1/2 as each of the others.
    plan = plan_updates(batch([0, 0, 1, 2], [5, 5, 5, 5]), UpdateConfig(rollouts_per_update=2))
    assert update_masses(plan).tolist() == pytest.approx([1.0, 1.0])
    nominal = LossConfig(divisor="nominal_rollouts", nominal_rollouts=2)
    assert update_masses(plan, nominal).tolist() == pytest.approx([1.0, 0.5])


def test_a_plan_that_keeps_nothing_has_no_mass() -> None:
    plan = plan_updates(batch([0], [5]), UpdateConfig(rollouts_per_update=2, leftover="drop"))
    assert update_masses(plan).tolist() == []
