"""What the weights promise: the loss of a batch and its gradient, however the batch is cut, ordered and spread."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    RolloutColumns,
    UpdateConfig,
    loss_weights,
    normalize_columns,
    plan_updates,
)
from miles_norm.loss import loss_factor, reduce_token_losses, row_of_tokens, update_masses
from miles_norm.result import NormalizedRewards

TOLERANCE = 1e-12
PARAMETERS = torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)
INVARIANT = [
    LossConfig(),
    LossConfig(aggregation="token_mean"),
    LossConfig(aggregation="prompt_mean"),
    LossConfig(aggregation="constant", max_tokens=7),
]


@dataclass
class Row:
    rollout: int
    features: list[list[float]]
    mask: list[int]


@st.composite
def rollouts(draw: Any) -> list[Row]:
    """One row per rollout: tokens with three features each, some of them masked."""
    number = st.integers(-200, 200).map(lambda k: k / 100)
    rows = []
    for rollout in range(draw(st.integers(1, 4))):
        length = draw(st.integers(0, 6))
        features = draw(st.lists(st.lists(number, min_size=3, max_size=3), min_size=length, max_size=length))
        rows.append(Row(rollout, features, draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))))
    return rows


@st.composite
def cuts(draw: Any, rows: list[Row]) -> list[Row]:
    """The same tokens on more rows, in another order."""
    parts = []
    for row in rows:
        ends = sorted({*draw(st.lists(st.integers(0, len(row.mask)), max_size=3)), len(row.mask)})
        begins = [0, *ends[:-1]]
        parts += [Row(row.rollout, row.features[b:e], row.mask[b:e]) for b, e in zip(begins, ends, strict=True)]
    return draw(st.permutations(parts))


def result_of(rows: list[Row]) -> NormalizedRewards:
    return normalize_columns(
        RolloutColumns(
            group=[row.rollout // 2 for row in rows],
            rollout=[row.rollout for row in rows],
            reward=[float(row.rollout) for row in rows],
            trainable_tokens=[sum(row.mask) for row in rows],
        ),
        NormalizationConfig(),
    )


def losses_of(rows: list[Row], parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed token losses of a small model, masks, and where rows begin."""
    features = torch.tensor([f for row in rows for f in row.features], dtype=torch.float64).reshape(-1, 3)
    mask = torch.tensor([m for row in rows for m in row.mask], dtype=torch.int64)
    ends = torch.tensor([0, *(len(row.mask) for row in rows)]).cumsum(0)
    return angle_of(features, parameters).sin() + 0.3, mask, ends


def summed(rows: list[Row], weights: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one micro-batch."""
    parameters = PARAMETERS.clone().requires_grad_()
    losses, mask, ends = losses_of(rows, parameters)
    loss = factor * reduce_token_losses(losses, weights, mask, rows=row_of_tokens(ends, len(mask)))
    (gradient,) = torch.autograd.grad(loss, parameters)
    return loss.detach(), gradient


def scale(rows: list[Row], weights: Tensor) -> tuple[float, float]:
    """Sums of |w l| and of |w l'| over the trainable tokens: what rounding is measured against."""
    losses, mask, ends = losses_of(rows, PARAMETERS)
    features = torch.tensor([f for row in rows for f in row.features], dtype=torch.float64).reshape(-1, 3)
    weight = weights[row_of_tokens(ends, len(mask))] * mask
    slopes = features.abs() * angle_of(features, PARAMETERS).cos().abs()[:, None]
    return float((weight * losses.abs()).sum()), float((weight[:, None] * slopes).sum())


def angle_of(features: Tensor, parameters: Tensor) -> Tensor:
    """Term by term, so that its bits do not depend on how many tokens are computed together."""
    return sum((features[:, k] * parameters[k] for k in range(3)), start=features.new_zeros(len(features)))


def close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], sizes: tuple[float, float]) -> bool:
    parts = zip(ours, expected, sizes, strict=True)
    return all(float((a - b).abs().max()) <= TOLERANCE * size for a, b, size in parts)


def whole(rows: list[Row], config: LossConfig) -> tuple[tuple[Tensor, Tensor], tuple[float, float]]:
    weights = loss_weights(result_of(rows), config)
    return summed(rows, weights), scale(rows, weights)


@pytest.mark.parametrize("config", INVARIANT, ids=lambda config: config.aggregation)
@given(data=st.data())
def test_cutting_and_ordering_change_nothing(config: LossConfig, data: st.DataObject) -> None:
    rows = data.draw(rollouts())
    cut = data.draw(cuts(rows))
    expected, size = whole(rows, config)
    assert close(whole(cut, config)[0], expected, size)


@pytest.mark.parametrize("config", INVARIANT, ids=lambda config: config.aggregation)
@given(data=st.data())
def test_micro_batches_ranks_and_accumulation_steps_change_nothing(config: LossConfig, data: st.DataObject) -> None:
    """Rows anywhere; every rank runs as many backwards as the others, some of them empty; gradients are averaged."""
    rows = data.draw(cuts(data.draw(rollouts())))
    weights = loss_weights(result_of(rows), config)
    expected, size = summed(rows, weights), scale(rows, weights)
    ranks, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    place = data.draw(st.lists(st.integers(0, ranks * steps - 1), min_size=len(rows), max_size=len(rows)))
    factor = loss_factor("ddp", data_parallel=ranks)
    parts = []
    for slot in range(ranks * steps):
        here = [n for n, where in enumerate(place) if where == slot]
        parts.append(summed([rows[n] for n in here], weights[here], factor))
    loss, gradient = (sum(part[kind] for part in parts) / ranks for kind in (0, 1))
    assert close((loss, gradient), expected, size)


@given(st.data())
def test_the_sum_of_weights_times_tokens(data: st.DataObject) -> None:
    """1; with E empty rollouts (R - E) / R; with rows as the divisor R / N."""
    rows = data.draw(cuts(data.draw(rollouts())))
    result = result_of(rows)
    tokens = result.trainable_tokens
    trained = {row.rollout for row in rows if sum(row.mask)}
    r, n = len({row.rollout for row in rows}), sum(sum(row.mask) > 0 for row in rows)
    empty = r - len(trained)

    def mass(**settings: Any) -> float:
        return float((loss_weights(result, LossConfig(**settings)) * tokens).sum())

    assert mass() == pytest.approx((r - empty) / r, rel=1e-14)
    some = 1.0 if trained else 0.0
    for aggregation in ("token_mean", "sample_mean", "prompt_mean"):
        assert mass(aggregation=aggregation) == pytest.approx(some, rel=1e-14)
    assert mass(count_empty_rollouts=False) == pytest.approx(some, rel=1e-14)
    if trained:
        assert mass(divisor="trained_rows") == pytest.approx(len(trained) / n, rel=1e-14)
    assert mass(divisor="nominal_rollouts", nominal_rollouts=7) == pytest.approx(len(trained) / 7, rel=1e-14)
    all_tokens = sum(sum(row.mask) for row in rows)
    assert mass(aggregation="constant", max_tokens=7) == pytest.approx(all_tokens / (7 * r), rel=1e-14)


@given(st.data(), st.integers(1, 3), st.booleans())
def test_the_sum_over_an_update_with_rows_as_the_divisor(data: st.DataObject, size: int, by_rows: bool) -> None:
    """R / N of the rollouts and rows with a token that the update keeps; over the batch, of all that the plan keeps."""
    rows = data.draw(cuts(data.draw(rollouts())))
    result = result_of(rows)
    settings: dict[str, Any] = {"unit": "rows", "rows_per_update": size} if by_rows else {"rollouts_per_update": size}
    plan = plan_updates(result, UpdateConfig(**settings))
    trained = [[row for row in update if sum(rows[row].mask)] for update in plan.updates]
    counts = [(len({rows[row].rollout for row in update}), len(update)) for update in trained]
    masses = update_masses(plan, LossConfig(divisor="trained_rows")).tolist()
    assert masses == pytest.approx([r / n if n else 0.0 for r, n in counts], rel=1e-14)
    kept = [row for update in trained for row in update]
    epoch = update_masses(plan, LossConfig(divisor="trained_rows", scope="batch")).sum()
    expected = len({rows[row].rollout for row in kept}) / max(len(kept), 1)
    assert float(epoch) == pytest.approx(expected, rel=1e-14)


def test_sample_mean_changes_when_a_rollout_is_cut() -> None:
    """Losses 0.3 + sin(0) = 0.3 on rollout 0, and 1.3 on rollout 1: (0.3 + 1.3) / 2 against (0.3 + 0.3 + 1.3) / 3."""
    ninety = [math.pi / 2 / float(PARAMETERS[0]), 0.0, 0.0]
    first = Row(0, [[0.0] * 3] * 2, [1, 1])
    second = Row(1, [ninety], [1])
    halves = [Row(0, [[0.0] * 3], [1]), Row(0, [[0.0] * 3], [1])]
    config = LossConfig(aggregation="sample_mean")
    (loss, _), _ = whole([first, second], config)
    (cut_loss, _), _ = whole([*halves, second], config)
    assert float(loss) == pytest.approx(0.8, rel=1e-14)
    assert float(cut_loss) == pytest.approx(1.9 / 3, rel=1e-14)
    # The others do not move.
    for same in INVARIANT:
        assert close(whole([*halves, second], same)[0], *whole([first, second], same))


@pytest.mark.parametrize(
    ("aggregation", "changes"),
    [
        ("token_mean", False),
        ("sample_mean", True),
        ("rollout_mean", False),
        ("rollout_row_mean", True),
        ("prompt_mean", False),
        ("constant", False),
    ],
)
def test_which_aggregations_a_cut_changes(aggregation: Any, changes: bool) -> None:
    """The column of docs/loss.md: rollout 0 has losses 0.3, 0.3, 1.3, cut before the last; rollout 1 has 0.3."""
    ninety = [math.pi / 2 / float(PARAMETERS[0]), 0.0, 0.0]
    tokens = [[0.0] * 3, [0.0] * 3, ninety]
    other = Row(1, [[0.0] * 3], [1])
    config = LossConfig(aggregation=aggregation, max_tokens=5 if aggregation == "constant" else None)
    (loss, _), _ = whole([Row(0, tokens, [1, 1, 1]), other], config)
    (cut, _), _ = whole([Row(0, tokens[:2], [1, 1]), Row(0, tokens[2:], [1]), other], config)
    assert (abs(float(loss - cut)) > 1e-3) == changes
    assert changes or float(cut) == pytest.approx(float(loss), rel=1e-14)
