"""Metrics against a slow oracle that loops over rows, and the loggers against the packages themselves."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import problems
from command_line import EXAMPLE, LORA, MAINSTREAM, SLIME
from hypothesis import given

from miles_norm import LossConfig, NormalizationConfig, loss_weights, normalize_rewards, read_dump
from miles_norm.audit.loggers import DictLogger, PrometheusLogger, TensorBoardLogger, WandbLogger
from miles_norm.audit.metrics import AGGREGATIONS, audit_metrics, relative_weights
from miles_norm.errors import MilesNormError, MissingDependencyError
from miles_norm.result import NormalizedRewards

HEAD = "miles_norm/"


def metrics_of(path: Path, **settings: Any) -> tuple[NormalizedRewards, dict[str, float]]:
    result = normalize_rewards(read_dump(path).samples, NormalizationConfig(**settings))
    return result, {name.removeprefix(HEAD): value for name, value in audit_metrics(result).items()}


def slow_row_advantages(rows: list[dict[str, Any]], groups: list[int]) -> list[float]:
    """GRPO with every row an observation of its group, written down again."""
    by_group: dict[int, list[float]] = defaultdict(list)
    for row, group in zip(rows, groups, strict=True):
        by_group[group].append(row["reward"])
    found = []
    for row, group in zip(rows, groups, strict=True):
        rewards = np.array(by_group[group])
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        found.append(0.0 if spread == 0 else (row["reward"] - rewards.mean()) / (spread + 1e-6))
    return found


@pytest.mark.parametrize("path", [EXAMPLE, MAINSTREAM, LORA, SLIME], ids=lambda path: path.stem)
def test_gap_between_rows_and_rollouts_equals_a_slow_oracle(path: Path) -> None:
    rows = read_dump(path).samples
    result, metrics = metrics_of(path)
    groups, rollouts = result.index.row_group.tolist(), result.index.row_rollout.tolist()
    ours = result.advantages.tolist()
    of_rollout: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    for n, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        mask = row["loss_mask"] if row["loss_mask"] is not None else [1] * row["response_length"]
        tokens = 0 if row.get("remove_sample") else sum(mask)
        of_rollout[rollout].append((tokens, -n, row["reward"]))
    speaking = np.array([max(siblings)[2] for siblings in of_rollout.values()])
    own = np.array([row["reward"] for row in rows])
    assert metrics["reward_mean"] == pytest.approx(speaking.mean(), abs=1e-12)
    assert metrics["row_reward_mean"] == pytest.approx(own.mean(), abs=1e-12)
    assert metrics["reward_mean_gap"] == pytest.approx(own.mean() - speaking.mean(), abs=1e-12)
    assert metrics["reward_std_gap"] == pytest.approx(own.std() - speaking.std(), abs=1e-12)
    theirs = slow_row_advantages(rows, groups)
    trains = [sum(tokens for tokens, place, _ in of_rollout[r] if place == -n) > 0 for n, r in enumerate(rollouts)]
    pairs = [(a, b) for a, b, trained in zip(ours, theirs, trains, strict=True) if trained]
    assert metrics["trained_rows"] == len(pairs)
    flips = sum(a * b < 0 for a, b in pairs)
    assert metrics["vs_rows/sign_flips"] == flips
    assert metrics["vs_rows/sign_flip_share"] == pytest.approx(flips / len(pairs))
    assert metrics["vs_rows/mean_abs_change"] == pytest.approx(np.mean([abs(a - b) for a, b in pairs]), abs=1e-6)
    assert metrics["vs_rows/max_abs_change"] == pytest.approx(max(abs(a - b) for a, b in pairs), abs=1e-6)


def test_the_rows_of_the_mainstream_dump_that_turn() -> None:
    """So that the oracle above is not fooled by a dump where nothing turns."""
    assert metrics_of(MAINSTREAM)[1]["vs_rows/sign_flips"] == 7


def slow_gini(weights: list[float]) -> float:
    """Mean absolute difference of all pairs, over twice the mean."""
    n = len(weights)
    return sum(abs(a - b) for a in weights for b in weights) / (2 * n * n * (sum(weights) / n))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_rollouts_equal_a_slow_oracle(aggregation: str) -> None:
    result, metrics = metrics_of(MAINSTREAM)
    extra = {"max_tokens": 100} if aggregation == "constant" else {}
    mass: dict[int, float] = defaultdict(float)
    weights = loss_weights(result, LossConfig(aggregation=aggregation, **extra)).tolist()
    for rollout, weight, tokens in zip(
        result.index.row_rollout.tolist(), weights, result.trainable_tokens.tolist(), strict=True
    ):
        mass[rollout] += weight * tokens
    known = [value for value in mass.values() if value]
    relative = [value / (sum(known) / len(known)) for value in known]
    assert metrics[f"weight/{aggregation}_min"] == pytest.approx(min(relative))
    assert metrics[f"weight/{aggregation}_max"] == pytest.approx(max(relative))
    assert metrics[f"weight/{aggregation}_gini"] == pytest.approx(slow_gini(relative), abs=1e-12)
    # Rollouts 9 and 13 train nothing.
    assert [rollout for rollout, value in enumerate(relative_weights(result, aggregation).tolist()) if not value] == [
        9,
        13,
    ]


def rows_of(*rollouts: tuple[int, float | None, int], **fields: Any) -> list[dict[str, Any]]:
    """One rollout per (group, reward, fan-out); each row has four tokens."""
    return [
        {"group_index": group, "rollout_id": number, "reward": reward, "response_length": 4, **fields}
        for number, (group, reward, fan_out) in enumerate(rollouts)
        for _ in range(fan_out)
    ]


def test_counts_by_hand() -> None:
    """Group 0 all right, group 1 all wrong, group 2 in between, group 3 mixed, one fan-out of 40."""
    rows = rows_of(
        (0, 1.0, 1), (0, 1.0, 2), (1, 0.0, 3), (1, 0.0, 4), (2, 0.5, 5), (2, 0.5, 40), (3, 1.0, 1), (3, 0.0, 9)
    )
    result = normalize_rewards(rows)
    metrics = {name.removeprefix(HEAD): value for name, value in audit_metrics(result).items()}
    assert metrics["zero_variance_share"] == 0.75
    assert (metrics["all_right_share"], metrics["all_wrong_share"]) == (0.25, 0.25)
    assert (metrics["effective_rollouts"], metrics["effective_groups"]) == (2, 1)
    assert metrics["single_row_rollout_share"] == 0.25
    histogram = {name: value for name, value in metrics.items() if name.startswith("fan_out_") and name[8].isdigit()}
    assert histogram == {
        "fan_out_1": 2, "fan_out_2": 1, "fan_out_3_4": 2, "fan_out_5_8": 1, "fan_out_9_16": 1, "fan_out_17_32": 0,
        "fan_out_33_up": 1,
    }  # fmt: skip
    assert [name for name, value in metrics.items() if name.startswith("group_source_") and value] == [
        "group_source_group_key"
    ]


@pytest.mark.parametrize(("reward", "right", "wrong"), [(1.0, 1.0, 0.0), (0.0, 0.0, 1.0), (-1.0, 0.0, 1.0)])
def test_a_batch_of_one_reward_is_right_above_zero(reward: float, right: float, wrong: float) -> None:
    metrics = audit_metrics(normalize_rewards(rows_of((0, reward, 1), (0, reward, 2))))
    assert (metrics[HEAD + "all_right_share"], metrics[HEAD + "all_wrong_share"]) == (right, wrong)


def test_states_of_rows() -> None:
    rows = [
        *rows_of((0, 1.0, 1), (0, 0.0, 1)),
        {"group_index": 0, "rollout_id": 7, "reward": None, "response_length": 4},
        {"group_index": 0, "rollout_id": 8, "reward": 0.5, "response_length": 4, "remove_sample": True},
        {"group_index": 0, "rollout_id": 8, "reward": 0.25, "response_length": 4, "remove_sample": True},
        {"group_index": 0, "rollout_id": 8, "reward": math.nan, "response_length": 4, "is_padding": True},
    ]
    metrics = audit_metrics(normalize_rewards(rows, NormalizationConfig(missing_reward="exclude")))
    found = [metrics[HEAD + name] for name in ("unscored_rows", "untrained_rows", "untrained_rollouts")]
    assert found == [1, 2, 1]
    assert metrics[HEAD + "disagreeing_rollouts"] == 1
    # Rollouts 1.0, 0.0 and 0.5; rows also 0.25; the padding row is none.
    assert metrics[HEAD + "row_reward_mean"] == pytest.approx(1.75 / 4)


def test_extremes() -> None:
    """One success among sixteen: (1 - 1/16) / sqrt(1/16) = 3.75; all others are -0.25."""
    rows = rows_of(*((0, float(n == 0), 1) for n in range(16)))
    metrics = audit_metrics(normalize_rewards(rows))
    assert metrics[HEAD + "advantage_max"] == pytest.approx(3.75, rel=1e-4)
    assert metrics[HEAD + "extreme_share"] == 1 / 16


def test_guessed_groups_and_a_baseline_that_gives_no_number() -> None:
    rows = [{"reward": 3.0, "response_length": 1}]
    result = normalize_rewards(rows, NormalizationConfig(n_samples_per_prompt=1, rollout_batch_size=1))
    metrics = audit_metrics(result, "slime")
    assert metrics[HEAD + "group_source_fixed_fan_out"] == 1
    assert metrics[HEAD + "vs_slime/nonfinite_rows"] == 1
    assert HEAD + "vs_slime/sign_flips" not in metrics


def test_names_do_not_depend_on_the_batch() -> None:
    """A curve must not begin or end with a batch; what cannot be computed is left out only where nothing is there."""
    names = [set(audit_metrics(normalize_rewards(rows))) for rows in (rows_of((0, 1.0, 1)), read_dump(EXAMPLE).samples)]
    per_group = {HEAD + name for name in ("zero_variance_share", "all_right_share", "all_wrong_share")}
    assert names[1] - names[0] == per_group
    assert names[0] <= names[1]


def test_metrics_extend_those_of_the_result() -> None:
    result = normalize_rewards(read_dump(EXAMPLE).samples)
    assert result.metrics().items() <= audit_metrics(result).items()
    assert audit_metrics(result, baseline=None).keys() == {name for name in audit_metrics(result) if "/vs_" not in name}


@given(problems())
def test_any_batch_has_metrics(problem: Any) -> None:
    batch, config = problem
    try:
        result = normalize_rewards(batch.samples, config, batch.sizes)
    except MilesNormError:
        return
    metrics = audit_metrics(result)
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
    assert 0 <= metrics[HEAD + "effective_rollouts"] <= metrics[HEAD + "counted_rollouts"]
    for aggregation in AGGREGATIONS:
        if (gini := metrics.get(f"{HEAD}weight/{aggregation}_gini")) is not None:
            assert 0 <= gini < 1
            assert metrics[f"{HEAD}weight/{aggregation}_min"] <= 1 + 1e-9
    assert (
        math.isclose(metrics.get(f"{HEAD}weight/rollout_row_mean_max", 1.0), 1.0) or result.columns.adapter is not None
    )


# Loggers


def test_dict_logger_keeps_every_step() -> None:
    logger = DictLogger()
    logger.log({"a": 1.0}, 0)
    logger.log({"b": 2.0}, 0)
    logger.log({"a": 3.0}, 1)
    assert logger.steps == {0: {"a": 1.0, "b": 2.0}, 1: {"a": 3.0}}


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    for step in (3, 4):
        logger.log({"miles_norm/rows": 58.0 + step}, step)
    logger.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("miles_norm/rows")] == [(3, 61.0), (4, 62.0)]


def test_prometheus_shows_the_latest_value() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    logger = PrometheusLogger(registry)
    metrics = audit_metrics(normalize_rewards(read_dump(EXAMPLE).samples))
    logger.log(dict.fromkeys(metrics, 0.0), 0)
    logger.log(metrics, 7)
    text = prometheus.generate_latest(registry).decode()
    assert "\nmiles_norm_rows 58.0\n" in text
    assert "\nmiles_norm_vs_rows_sign_flips 0.0\n" in text
    assert "\nmiles_norm_step 7.0\n" in text
    assert text.count("# TYPE") == len(metrics) + 1


def test_wandb_gets_one_entry_per_step() -> None:
    entries = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            entries.append((step, metrics))

    WandbLogger(Run()).log({"miles_norm/rows": 58.0}, 7)
    assert entries == [(7, {"miles_norm/rows": 58.0})]


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: TensorBoardLogger("nowhere"), "tensorboard"),
        (WandbLogger, "wandb"),
        (PrometheusLogger, "prometheus-client"),
    ],
)
def test_a_package_that_is_not_installed_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("miles_norm.audit.loggers.import_module", absent)
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        make()


def test_gpu_and_cpu_columns_are_the_same_thing() -> None:
    """Nothing but tensors of the columns' device is made on the way."""
    result = normalize_rewards(read_dump(EXAMPLE).samples, NormalizationConfig(device="cpu"))
    with torch.device("meta"):  # a tensor made without naming its device would land there and fail
        assert audit_metrics(result)[HEAD + "rows"] == 58
