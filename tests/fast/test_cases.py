"""Cases from public bug reports (``data/public_reports.json``); ``arithmetic`` has their numbers worked out by hand.

Expectations are named in ``REWARD_SIDE`` and ``LOSS_SIDE``; an unknown key is an error.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_norm import (
    LossConfig,
    MilesNormError,
    NormalizationConfig,
    RolloutDump,
    UpdateConfig,
    loss_weights,
    normalize_rewards,
    plan_updates,
    read_dump,
    write_dump,
)
from miles_norm.loss import reduce_token_losses
from miles_norm.result import NormalizedRewards

CASES = json.loads((Path(__file__).parent / "data" / "public_reports.json").read_text(encoding="utf-8"))

# The neutral names of the case file, and ours.
SETTINGS = {
    "advantage_estimator": "advantage_estimator",
    "coerce_numeric_strings": "coerce_numeric_strings",
    "eps": "std_epsilon",
    "group_fallback": "group_fallback",
    "group_key": "group_key",
    "inactive_rollouts": "untrained_rollouts",
    "missing_reward": "missing_reward",
    "n_samples_per_prompt": "n_samples_per_prompt",
    "reward_key": "reward_key",
    "rollout_batch_size": "rollout_batch_size",
    "sibling_reward": "rollout_reward",
    "std_ddof": "std_ddof",
    "std_normalization": "grpo_std_normalization",
    "zero_std_tol": "zero_std_tolerance",
}
VALUES = {"raise": "error", "require_equal": "shared"}
# Read by the tests themselves.
OTHER_SETTINGS = {"drop_rollouts", "group_sizes", "input", "loss", "reward_dtype"}

REWARD_SIDE = {
    "advantages", "advantages_before_drop", "error", "groups", "ignored_fields", "kept_rows", "mainstream_rows",
    "metrics", "min_compute_dtype", "must_mention", "n_rollouts", "raw_rewards_preserved", "rollout_token_sums",
    "token_advantages", "tol", "trainable_tokens", "trained_rows", "warning_required",
}  # fmt: skip
LOSS_SIDE = {"loss", "micro_batch_losses", "rollout_mass", "row_token_weight", "step_losses", "steps"}
LOSS_SETTINGS = {"count_empty_rollouts", "micro_batches", "mode", "scope", "steps"}
TEXT = {"alternates", "note"}

# What the case file describes in words, and the warning that has to say it.
WARNINGS = {
    "single-group fallback": r"prompt groups were guessed: no row has 'group_index', so all 5 rows form one group",
    "tie between siblings with different rewards (order dependent)": r"tie between siblings with different rewards in "
    r"rollout 0: the first row speaks",
    "every group has one rollout although n_samples_per_prompt=4": r"every group has one rollout although "
    r"n_samples_per_prompt=4",
}
METRICS = {"n_rollouts": "rollouts", "n_rows": "rows", "reward_mean": "reward_mean"}


def variants() -> list[Any]:
    """Every case under its own config, and its alternates under theirs."""
    params = []
    for case in CASES:
        params.append(pytest.param(case, case["config"], case["expected"], id=case["id"]))
        for other in case["expected"].get("alternates", []):
            name = f"{case['id']}-{'-'.join(f'{key}={value}' for key, value in other['config'].items())}"
            params.append(pytest.param(case, case["config"] | other["config"], other["expected"], id=name))
    return params


def numbers(value: Any) -> Any:
    """Non-finite numbers are written {"$float": "NaN"}, so that the file is strict JSON."""
    if isinstance(value, dict):
        return float(value["$float"]) if value.keys() == {"$float"} else {k: numbers(v) for k, v in value.items()}
    return [numbers(item) for item in value] if isinstance(value, list) else value


def config_of(case_config: dict[str, Any]) -> NormalizationConfig:
    assert case_config.keys() <= SETTINGS.keys() | OTHER_SETTINGS
    return NormalizationConfig(
        **{
            name: VALUES.get(case_config[key], case_config[key])
            if isinstance(case_config[key], str)
            else case_config[key]
            for key, name in SETTINGS.items()
            if case_config.get(key) is not None
        }
    )


def samples_of(case: dict[str, Any]) -> list[Any]:
    if "inputs" in case:
        assert case["inputs"].keys() == {"nested_rewards"}
        return [
            [[{"reward": reward, "loss_mask": [1]} for reward in rollout] for rollout in group]
            for group in case["inputs"]["nested_rewards"]
        ]
    rows = [{key: value for key, value in row.items() if key != "token_losses"} for row in numbers(case["rows"])]
    if dtype := case["config"].get("reward_dtype"):
        rows = [row | {"reward": torch.tensor(row["reward"], dtype=getattr(torch, dtype))} for row in rows]
    return rows


@pytest.mark.parametrize(("case", "config", "expected"), variants())
def test_case(case: dict[str, Any], config: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert expected.keys() <= REWARD_SIDE | LOSS_SIDE | TEXT
    samples = samples_of(case)
    if "error" in expected:
        assert expected["error"] == "ValueError"
        with pytest.raises(ValueError, match=r"got: .*") as raised:
            normalize_rewards(samples, config_of(config), prompt_group_sizes=config.get("group_sizes"))
        assert isinstance(raised.value, MilesNormError)
        assert [text for text in expected["must_mention"] if text not in str(raised.value)] == []
        return
    result = normalize_rewards(samples, config_of(config), prompt_group_sizes=config.get("group_sizes"))
    check_rows(result, case, config, expected)
    check_rollouts(result, config, expected)
    check_loss(result, case, config.get("loss"), expected)
    if "ignored_fields" in expected:
        check_unknown_fields(result, samples, config, expected["ignored_fields"], tmp_path)


def check_rows(
    result: NormalizedRewards, case: dict[str, Any], config: dict[str, Any], expected: dict[str, Any]
) -> None:
    kept = expected.get("kept_rows", list(range(result.index.num_rows)))
    if "kept_rows" in expected:
        ids = [result.index.rollout_ids[rollout] for rollout in result.index.row_rollout.tolist()]
        assert kept == [row for row, rollout in enumerate(ids) if rollout not in config["drop_rollouts"]]
    if "advantages" in expected:
        tolerance = {"abs": expected["tol"], "rel": 0} if "tol" in expected else {"rel": 1e-6, "abs": 1e-6}
        assert result.advantages[kept].tolist() == pytest.approx(expected["advantages"], **tolerance)
    if "advantages_before_drop" in expected:
        assert result.advantages.tolist() == expected["advantages_before_drop"]
    if "groups" in expected:
        assert result.groups == expected["groups"]
    if "trained_rows" in expected:
        assert torch.nonzero(result.trained_rows)[:, 0].tolist() == expected["trained_rows"]
    if "trainable_tokens" in expected:
        assert result.trainable_tokens.tolist() == expected["trainable_tokens"]
    if "raw_rewards_preserved" in expected:
        assert result.raw_rewards.tolist() == expected["raw_rewards_preserved"]
    if "token_advantages" in expected:
        masks = [row["loss_mask"] for row in case["rows"]]
        ragged = result.token_advantages(masks)
        assert [tokens.tolist() for tokens in ragged] == expected["token_advantages"]


def check_rollouts(result: NormalizedRewards, config: dict[str, Any], expected: dict[str, Any]) -> None:
    # How many rollouts the loss divides by is another question where empty ones are left out of it.
    if "n_rollouts" in expected and config.get("loss", {}).get("count_empty_rollouts", True):
        assert int(result.counted_rollouts.sum()) == expected["n_rollouts"]
    if "mainstream_rows" in expected:
        rows = zip(map(str, result.index.rollout_ids), result.mainstream_rows.tolist(), strict=True)
        assert dict(rows) == expected["mainstream_rows"]
    if "rollout_token_sums" in expected:
        sums = torch.zeros(result.index.num_rollouts, dtype=torch.int64)
        assert (
            sums.index_add(0, result.index.row_rollout, result.trainable_tokens).tolist()
            == (expected["rollout_token_sums"])
        )
    if "metrics" in expected:
        found = result.metrics()
        assert {key: found[f"miles_norm/{METRICS[key]}"] for key in expected["metrics"]} == pytest.approx(
            expected["metrics"]
        )
    if "warning_required" in expected:
        pattern = WARNINGS[expected["warning_required"]]
        assert any(pattern in text for text in result.warnings), result.warnings
    if "min_compute_dtype" in expected:
        least = torch.finfo(getattr(torch, expected["min_compute_dtype"])).bits
        assert torch.finfo(result.statistics.mean.dtype).bits >= least


def check_loss(
    result: NormalizedRewards, case: dict[str, Any], settings: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    if settings is None:
        assert not LOSS_SIDE & expected.keys()
        return
    assert settings.keys() <= LOSS_SETTINGS
    assert settings["mode"] == "per_rollout_mean"
    config = LossConfig(
        aggregation="rollout_mean",
        count_empty_rollouts=settings.get("count_empty_rollouts", True),
        scope={"step": "update", "batch": "batch"}[settings.get("scope", "step")],
    )
    weights, rows = loss_weights(result, config), case["rows"]

    def loss(of: list[int], weights: torch.Tensor = weights) -> float:
        masks = [torch.tensor(rows[n]["loss_mask"] or [1] * rows[n]["response_length"]) for n in of]
        losses = torch.cat([torch.tensor(rows[n]["token_losses"], dtype=torch.float64) for n in of])
        row = torch.repeat_interleave(torch.arange(len(of)), torch.tensor([len(mask) for mask in masks]))
        return float(reduce_token_losses(losses, weights[of], torch.cat(masks), rows=row))

    if "row_token_weight" in expected:
        assert weights.tolist() == pytest.approx(expected["row_token_weight"], rel=1e-12)
    if "loss" in expected:
        assert loss(list(range(len(rows)))) == pytest.approx(expected["loss"], rel=1e-12)
    if "micro_batch_losses" in expected:
        assert [loss(of) for of in settings["micro_batches"]] == pytest.approx(expected["micro_batch_losses"])
    if "rollout_mass" in expected:
        mass = torch.zeros(result.index.num_rollouts, dtype=torch.float64)
        mass.index_add_(0, result.index.row_rollout, weights * result.trainable_tokens)
        ids = map(str, result.index.rollout_ids)
        assert dict(zip(ids, mass.tolist(), strict=True)) == pytest.approx(expected["rollout_mass"])
    if "step_losses" in expected or "steps" in expected:
        steps = expected.get("steps", settings["steps"])
        size = len({int(result.index.row_rollout[row]) for row in steps[0]})
        plan = plan_updates(result, UpdateConfig(rollouts_per_update=size))
        assert plan.updates == steps
        of_plan = loss_weights(result, config, plan)
        losses = [loss(update, of_plan) for update in plan.updates]
        assert losses == pytest.approx(expected["step_losses"], rel=1e-12)


def check_unknown_fields(
    result: NormalizedRewards, rows: list[dict[str, Any]], config: dict[str, Any], fields: list[str], folder: Path
) -> None:
    """A dump without newer keys and with unknown ones, through a file: the unknown are kept, and change nothing."""
    write_dump(RolloutDump(rows), folder / "dump.jsonl")
    dump = read_dump(folder / "dump.jsonl")
    for field in fields:
        assert [row[field] for row in dump.samples if field in row] == [row[field] for row in rows if field in row]
        assert any(field in row for row in dump.samples)
    assert normalize_rewards(dump.samples, config_of(config)).advantages.tolist() == result.advantages.tolist()


def test_no_case_is_lost() -> None:
    assert len(CASES) == 40
    assert {param.values[0]["id"] for param in variants()} == {case["id"] for case in CASES}
    for param in variants():
        assert (REWARD_SIDE | LOSS_SIDE) & param.values[2].keys()
