"""Loss weights: golden masses by hand, settings that contradict each other, states that do not train."""

import pytest
import torch

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    RolloutColumns,
    UpdateConfig,
    loss_weights,
    normalize_columns,
    plan_updates,
)
from miles_norm.errors import ConfigError
from miles_norm.loss import update_masses
from miles_norm.loss.updates import counted_rows
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


def test_prompt_mean_of_several_adapters_counts_groups_within_each() -> None:
    # Adapter x: group 0 with 4 + 2 tokens and group 1 with 3, so 1 / (2 * 6) and 1 / (2 * 3). Adapter y: group 0 is
    # another group there, and the only one with a token: 1 / (1 * 5).
    columns = RolloutColumns(
        group=[0, 0, 1, 0, 1],
        rollout=[0, 1, 2, 3, 4],
        reward=[1.0] * 5,
        trainable_tokens=[4, 2, 3, 5, 0],
        adapter=["x", "x", "x", "y", "y"],
    )
    result = normalize_columns(columns)
    weights = loss_weights(result, LossConfig(aggregation="prompt_mean"))
    assert weights.tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6, 1 / 5, 0], rel=1e-15)
    # Updates of two rollouts: group 0 of x alone, then group 1 of x and group 0 of y each alone with their adapter.
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=2))
    weights = loss_weights(result, LossConfig(aggregation="prompt_mean"), plan)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 5, 0], rel=1e-15)


def test_constant_divides_by_rollouts_and_the_configured_length() -> None:
    """A token weighs the same in every row, whatever its row, rollout or the longest row of the batch have."""
    config = LossConfig(aggregation="constant", max_tokens=200)
    assert loss_weights(batch(), config).tolist() == pytest.approx([1 / 600] * 6, rel=1e-15)
    # C is empty: counted as a rollout it stays in the divisor, and not otherwise.
    empty = batch(trainable_tokens=[50, 100, 30, 30, 30, 0])
    assert loss_weights(empty, config).tolist() == pytest.approx([1 / 600] * 5 + [0], rel=1e-15)
    without = LossConfig(aggregation="constant", max_tokens=200, count_empty_rollouts=False)
    assert loss_weights(empty, without).tolist() == pytest.approx([1 / 400] * 5 + [0], rel=1e-15)
    # Within an update of two rollouts, and for the last one alone; over the batch, three.
    plan = plan_updates(batch(), UpdateConfig(rollouts_per_update=2))
    assert loss_weights(plan.result, config, plan).tolist() == pytest.approx([1 / 400] * 5 + [1 / 200], rel=1e-15)
    by_batch = config.model_copy(update={"scope": "batch"})
    assert loss_weights(plan.result, by_batch, plan).tolist() == pytest.approx([1 / 600] * 6, rel=1e-15)
    # Each adapter for itself: A and B, and C.
    adapters = batch(adapter=["x"] * 5 + ["y"])
    assert loss_weights(adapters, config).tolist() == pytest.approx([1 / 400] * 5 + [1 / 200], rel=1e-15)


def test_a_total_of_rows_and_rollouts_with_a_plan() -> None:
    # Updates of two rollouts: A and B on 5 rows weigh 2/5, C on its row 1. Over the batch 3 rollouts on 6 rows: 1/2.
    plan = plan_updates(batch(), UpdateConfig(rollouts_per_update=2))
    assert update_masses(plan, LossConfig(divisor="trained_rows")).tolist() == pytest.approx([2 / 5, 1])
    by_batch = LossConfig(divisor="trained_rows", scope="batch")
    assert update_masses(plan, by_batch).sum() == pytest.approx(3 / 6)
    # C is dropped: 2 rollouts on 5 rows are left.
    dropped = plan_updates(batch(), UpdateConfig(rollouts_per_update=2, leftover="drop"))
    assert update_masses(dropped, by_batch).tolist() == pytest.approx([2 / 5])


def test_counts_of_the_longest_batches_do_not_overflow() -> None:
    """Products of counts pass 2**63: 2**31 - 1 nominal rollouts, and eight rows of 2**31 - 1 tokens."""
    tokens, nominal = 2**31 - 1, 2**31 - 1
    columns = RolloutColumns(group=[0] * 8, rollout=[0] * 8, reward=[1.0] * 8, trainable_tokens=[tokens] * 8)
    config = LossConfig(divisor="nominal_rollouts", nominal_rollouts=nominal)
    weights = loss_weights(normalize_columns(columns), config)
    assert weights.tolist() == pytest.approx([1 / (nominal * 8 * tokens)] * 8, rel=1e-15)


def test_a_batch_in_which_every_row_counts_needs_no_flags() -> None:
    assert counted_rows(batch()) is None
    assert plan_updates(batch()).row_update.tolist() == [0] * 6
    padded = counted_rows(batch(padding=[True] + [False] * 5))
    assert padded is not None
    assert padded.tolist() == [False] + [True] * 5
    columns = RolloutColumns(
        group=[0] * 6,
        rollout=ROLLOUTS,
        reward=[float("nan")] * 2 + [1.0] * 4,
        trainable_tokens=TOKENS,
        padding=[False] * 5 + [True],
    )
    rows = counted_rows(normalize_columns(columns, NormalizationConfig(missing_reward="exclude")))
    assert rows is not None
    assert rows.tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize(
    "settings",
    [
        *({"aggregation": name} for name in ("token_mean", "sample_mean", "rollout_mean", "rollout_row_mean")),
        {"aggregation": "prompt_mean"},
        {"aggregation": "constant", "max_tokens": 9},
        {"divisor": "trained_rows"},
        {"divisor": "nominal_rollouts", "nominal_rollouts": 4},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_nothing_to_train_gives_weights_of_zero(settings: dict[str, object]) -> None:
    result = batch(removed=[True] * 6)
    assert loss_weights(result, LossConfig(**settings)).tolist() == [0.0] * 6  # type: ignore[arg-type]


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
