"""Loss weights: golden masses by hand, settings that contradict each other, states that do not train."""

import pytest
import torch

from miles_norm import LossConfig, NormalizationConfig, RolloutColumns, loss_weights, normalize_columns
from miles_norm.errors import ConfigError
from miles_norm.result import NormalizedRewards

# Rollout A has rows of 50 and 100 tokens, B three rows of 30, C one of 40: R = 3, N = 6, 280 tokens.
TOKENS = [50, 100, 30, 30, 30, 40]
ROLLOUTS = [0, 0, 1, 1, 1, 2]


def batch(**columns: object) -> NormalizedRewards:
    given = {"group": [0, 0, 0, 0, 0, 1], "rollout": ROLLOUTS, "reward": [1.0] * 6, "trainable_tokens": TOKENS}
    return normalize_columns(RolloutColumns(**(given | columns)))  # type: ignore[arg-type]


def masses(result: NormalizedRewards, **settings: object) -> list[float]:
    """What each rollout weighs when every token loss is 1."""
    weights = loss_weights(result, LossConfig(**settings)) * result.trainable_tokens
    return torch.zeros(3, dtype=torch.float64).index_add_(0, result.index.row_rollout, weights).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"aggregation": "rollout_mean"}, [1 / 3, 1 / 3, 1 / 3]),
        ({"aggregation": "rollout_mean", "divisor": "trained_rows"}, [1 / 6, 1 / 6, 1 / 6]),
        ({"aggregation": "rollout_mean", "divisor": "nominal_rollouts", "nominal_rollouts": 4}, [1 / 4, 1 / 4, 1 / 4]),
        ({"aggregation": "rollout_row_mean"}, [1 / 3, 1 / 3, 1 / 3]),
        ({"aggregation": "sample_mean"}, [2 / 6, 3 / 6, 1 / 6]),
        ({"aggregation": "token_mean"}, [150 / 280, 90 / 280, 40 / 280]),
        # Group 0 has 240 tokens, group 1 has 40, and each group weighs 1/2.
        ({"aggregation": "prompt_mean"}, [150 / 480, 90 / 480, 40 / 80]),
        ({"aggregation": "constant", "max_tokens": 200}, [150 / 600, 90 / 600, 40 / 600]),
    ],
)
def test_mass_of_each_rollout(settings: dict[str, object], expected: list[float]) -> None:
    assert masses(batch(), **settings) == pytest.approx(expected, rel=1e-12)


def test_rollout_row_mean_weighs_the_rows_of_a_rollout_alike() -> None:
    result = batch()
    weights = loss_weights(result, LossConfig(aggregation="rollout_row_mean")) * result.trainable_tokens
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3], rel=1e-12)


def test_an_empty_rollout_counts_unless_told_otherwise() -> None:
    result = batch(removed=[False] * 5 + [True])
    assert masses(result) == pytest.approx([1 / 3, 1 / 3, 0], rel=1e-12)  # (R - E) / R = 2/3
    assert masses(result, count_empty_rollouts=False) == pytest.approx([1 / 2, 1 / 2, 0], rel=1e-12)


def test_empty_rows_count_only_when_asked() -> None:
    result = batch(removed=[True] + [False] * 5)
    assert masses(result, aggregation="sample_mean") == pytest.approx([1 / 5, 3 / 5, 1 / 5], rel=1e-12)
    counted = masses(result, aggregation="sample_mean", count_empty_rows=True)
    assert counted == pytest.approx([1 / 6, 3 / 6, 1 / 6], rel=1e-12)


def test_padding_rows_enter_no_denominator() -> None:
    result = batch(padding=[True] + [False] * 5)
    assert masses(result, aggregation="sample_mean", count_empty_rows=True) == pytest.approx([1 / 5, 3 / 5, 1 / 5])
    assert loss_weights(result)[0] == 0


def test_excluded_rollouts_enter_no_denominator() -> None:
    columns = RolloutColumns(
        group=[0, 0, 0], rollout=[0, 1, 2], reward=[1, float("nan"), 0], trainable_tokens=[2, 2, 2]
    )
    result = normalize_columns(columns, NormalizationConfig(missing_reward="exclude"))
    assert loss_weights(result).tolist() == [0.25, 0.0, 0.25]


def test_adapters_count_each_on_their_own() -> None:
    # Adapter x has rollouts A and B, adapter y has C: 1/2, 1/2 and 1.
    assert masses(batch(adapter=["x"] * 5 + ["y"])) == pytest.approx([1 / 2, 1 / 2, 1], rel=1e-12)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sample_mean", "rollout_mean", "rollout_row_mean", "prompt_mean"]
)
def test_nothing_to_train_gives_weights_of_zero(aggregation: str) -> None:
    result = batch(removed=[True] * 6)
    assert loss_weights(result, LossConfig(aggregation=aggregation)).tolist() == [0.0] * 6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "constant"}, "without max_tokens"),
        ({"max_tokens": 5}, "max_tokens=5 with aggregation='rollout_mean'"),
        ({"divisor": "nominal_rollouts"}, "without nominal_rollouts"),
        ({"nominal_rollouts": 5}, "nominal_rollouts=5 with divisor='rollouts'"),
        ({"aggregation": "token_mean", "divisor": "trained_rows"}, "divisor='trained_rows' with aggregation"),
        ({"aggregation": "mean"}, "should be 'token_mean'"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)  # type: ignore[arg-type]
