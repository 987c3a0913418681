"""What named frameworks compute, against what their own code returned on real rows (``data/golden.json``).

verl's rule is compared with verl itself, in ``tests/integration/test_verl_baseline.py``.
"""

import math
from typing import Any

import pytest
import torch
from golden_dumps import AGENT_LIGHTNING, GOLDEN, LAYOUT, VARIANTS, dump_of, miles_results

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns, normalize_rewards
from miles_norm.audit.baselines import BASELINES, baseline_advantages
from miles_norm.config import EstimatorOptions
from miles_norm.errors import ConfigError, DisagreeingRewardsError, MissingRewardError
from miles_norm.result import NormalizedRewards

MILES = {"miles_pr2369": "miles-2369", "miles_head": "miles-2498"}


def check(found: torch.Tensor, golden: list[float]) -> None:
    assert found.dtype == torch.float32
    # The same float32 arithmetic; where a group's terms are added in another order a last bit may differ.
    assert found.tolist() == pytest.approx(golden, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("name", "version", "variant", "upstream"), miles_results())
def test_miles(name: str, version: str, variant: str, upstream: dict[str, Any]) -> None:
    dump = dump_of(name)
    config = NormalizationConfig(**VARIANTS[variant], **LAYOUT)
    result = normalize_rewards(dump.samples, config, dump.metadata.get("prompt_group_sizes"))
    if "raises" in upstream:
        with pytest.raises(DisagreeingRewardsError, match="siblings of rollouts 1, 4, 12, 15, 20, 23") as caught:
            baseline_advantages(result, MILES[version])
        assert caught.value.rows[:4] == (2, 3, 4, 5)
        return
    check(baseline_advantages(result, MILES[version]), upstream["normalized"])


def test_miles_without_sizes_mixes_the_prompts_of_two_adapters() -> None:
    result = normalize_rewards(dump_of("miles_multi_lora.pt").samples)
    golden = GOLDEN["miles_multi_lora.pt"]
    variant = "grpo_std_on_without_prompt_group_sizes"
    check(baseline_advantages(result, "miles-2369"), golden["miles_pr2369"][variant]["normalized"])
    assert golden["miles_head"][variant]["raises"] == "ValueError"
    with pytest.raises(DisagreeingRewardsError, match="row 0: 1") as caught:
        baseline_advantages(result, "miles-2498")
    assert {0, 14, 15} <= set(caught.value.rows)  # the rows that upstream's message names


@pytest.mark.parametrize("variant", VARIANTS)
def test_slime_on_fan_out(variant: str) -> None:
    golden = GOLDEN["slime_dump.pt"]["slime"]["post_process_rewards"][variant]
    config = NormalizationConfig(**VARIANTS[variant], **LAYOUT)
    check(
        baseline_advantages(normalize_rewards(dump_of("slime_dump.pt").samples, config), "slime"), golden["normalized"]
    )


def test_slime_where_the_count_fits_by_chance() -> None:
    golden = GOLDEN["slime_dump.pt"]["slime"]["count_coincidence_n2_b29_grpo_std_on"]
    config = NormalizationConfig(n_samples_per_prompt=2, rollout_batch_size=29)
    check(
        baseline_advantages(normalize_rewards(dump_of("slime_dump.pt").samples, config), "slime"), golden["normalized"]
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("baseline", ["rows", "slime"])
def test_rows_and_slime_where_each_rollout_has_one_row(baseline: str, variant: str) -> None:
    golden = GOLDEN["slime_dump.pt"]["slime"]["one_row_per_rollout_n4_b6"]
    rows = [dump_of("slime_dump.pt").samples[row] for row in golden["row_indices"]]
    result = normalize_rewards(rows, NormalizationConfig(**VARIANTS[variant], **LAYOUT))
    check(baseline_advantages(result, baseline), golden[variant]["normalized"])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "grpo_no_normalization"])
def test_rows_of_one_group_are_what_slime_makes_of_a_batch(variant: str) -> None:
    golden = GOLDEN["slime_dump.pt"]["slime"]["post_process_rewards"][variant]
    rows = [dict(row, group_index=0) for row in dump_of("slime_dump.pt").samples]
    found = baseline_advantages(normalize_rewards(rows, NormalizationConfig(**VARIANTS[variant])), "rows")
    # float64 inside, float32 over 58 rows upstream.
    assert found.tolist() == pytest.approx(golden["normalized"], rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("form", AGENT_LIGHTNING)
def test_agent_lightning_to_the_bit(form: str, scaled: bool) -> None:
    golden = AGENT_LIGHTNING[form]
    columns = RolloutColumns(
        group=golden["data_id_list"],
        rollout=golden["rollout_id_list"],
        reward=golden["token_level_score_sums"],
        trainable_tokens=golden["response_mask_sums"],
    )
    result = normalize_columns(columns, NormalizationConfig(grpo_std_normalization=scaled))
    name = f"rollout_level_advantage_grpo_std_{'on' if scaled else 'off'}"
    assert baseline_advantages(result, "agent-lightning").tolist() == golden[name]["row_advantage"]


def of(rewards: list[float | None], rollouts: list[int], **settings: Any) -> NormalizedRewards:
    rows = [
        {"group_index": 0, "rollout_id": rollout, "reward": reward, "response_length": 1}
        for reward, rollout in zip(rewards, rollouts, strict=True)
    ]
    return normalize_rewards(rows, NormalizationConfig(**settings))


def test_one_row() -> None:
    """slime divides 0 by the deviation of one value; Miles leaves 0; verl leaves the reward, divided by 1 + 1e-6."""
    result = of([3.0], [0], n_samples_per_prompt=1, rollout_batch_size=1)
    assert math.isnan(baseline_advantages(result, "slime").item())
    assert baseline_advantages(result, "miles-2369").item() == 0.0
    assert baseline_advantages(result, "miles-2498").item() == 0.0
    assert baseline_advantages(result, "verl").item() == pytest.approx(3.0, rel=2e-6)
    assert baseline_advantages(result, "agent-lightning").item() == 3.0
    assert baseline_advantages(result, "rows").item() == 0.0


def test_nan_spreads_and_none_stops() -> None:
    nan = of([1.0, math.nan, 0.0], [0, 1, 2], missing_reward="exclude", n_samples_per_prompt=3, rollout_batch_size=1)
    for name in ("miles-2369", "miles-2498", "slime", "verl", "agent-lightning"):
        assert torch.isnan(baseline_advantages(nan, name)).all(), name
    assert baseline_advantages(nan, "rows").tolist() == nan.advantages.tolist()
    none = of([1.0, None, 0.0], [0, 1, 2], missing_reward="exclude", n_samples_per_prompt=3, rollout_batch_size=1)
    for name in ("miles-2369", "miles-2498", "slime", "verl"):
        with pytest.raises(MissingRewardError, match=r"reward of row 1\n") as caught:
            baseline_advantages(none, name)
        assert caught.value.rows == (1,)
    # Agent Lightning counts it as 0: rewards 1, 0, 0 have mean 1/3 and deviation 1 / sqrt(3).
    assert baseline_advantages(none, "agent-lightning").tolist() == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-2)


def test_siblings_of_nan_disagree_in_miles() -> None:
    """NaN equals nothing, itself included; alone in its rollout there is nothing to compare it with."""
    both = of([math.nan, math.nan, 0.0], [0, 0, 1], missing_reward="exclude")
    with pytest.raises(DisagreeingRewardsError, match="siblings of rollout 0"):
        baseline_advantages(both, "miles-2498")


def test_agent_lightning_refuses_siblings_that_disagree() -> None:
    with pytest.raises(DisagreeingRewardsError, match="reward of row 1") as caught:
        baseline_advantages(of([1.0, 0.0, 1.0], [0, 0, 1]), "agent-lightning")
    assert caught.value.rows == (1,)


def test_rows_reads_every_setting() -> None:
    """Rows 1 and 0 0 0: mean of the others 0 for the success, 1/3 for each failure; one row has no token."""
    result = of([1.0, 0.0, 0.0, 0.0], [0, 1, 1, 1], advantage_estimator="rloo")
    assert baseline_advantages(result, "rows").tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    whitened = of([1.0, 0.0, 0.0, 0.0], [0, 1, 1, 1], options=EstimatorOptions(whitening="rollout"))
    assert baseline_advantages(whitened, "rows").double().std().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("slime", {"advantage_estimator": "rloo"}, "got:      advantage_estimator rloo"),
        ("slime", {}, "n_samples_per_prompt=None, rollout_batch_size=None"),
        ("miles-2498", {"advantage_estimator": "opo"}, "reinforce_plus_plus_baseline, without whitening"),
        ("miles-2369", {"options": EstimatorOptions(whitening="token")}, "options.whitening=token"),
        ("verl", {"rewards_normalization": False}, "grpo with rewards_normalization=False"),
        ("verl", {"advantage_estimator": "reinforce_plus_plus_baseline"}, "one of grpo, gspo, dr_grpo, without"),
        ("agent-lightning", {"advantage_estimator": "ppo"}, "take the baseline 'rows'"),
        ("trl", {}, "one of rows, miles-2369, miles-2498, slime, agent-lightning, verl"),
    ],
)
def test_what_a_framework_does_not_have(name: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"baseline '{name}'") as caught:
        baseline_advantages(of([1.0, 0.0], [0, 1], **settings), name)
    assert text in str(caught.value)


def test_every_baseline_says_its_rule() -> None:
    assert all(baseline.rule for baseline in BASELINES.values())
