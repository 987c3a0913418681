"""Real rollout dumps against what upstream code returned on them (``data/golden.json``).

Miles is run with its mainstream rule (``miles_pr2369``) and without (``miles_head``, where siblings must agree). slime
forms groups by counting rows, so it agrees where every rollout has one row, and differs elsewhere.
"""

import math
import statistics
from typing import Any

import pytest
import torch
from golden_dumps import GOLDEN, LAYOUT, POLICY, VARIANTS, dump_of, miles_results

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.errors import DisagreeingRewardsError


@pytest.mark.parametrize(("name", "version", "variant", "upstream"), miles_results())
def test_miles(name: str, version: str, variant: str, upstream: dict[str, Any]) -> None:
    dump = dump_of(name)
    config = NormalizationConfig(**VARIANTS[variant], **LAYOUT, rollout_reward=POLICY[version])
    sizes = dump.metadata.get("prompt_group_sizes")
    if "raises" in upstream:
        assert upstream["raises"] == "ValueError"
        with pytest.raises(DisagreeingRewardsError, match=r"rollout 1: rows 2, 3, 4, 5 have rewards 1, 0, 0.25, 0.5"):
            normalize_rewards(dump.samples, config, sizes)
        assert (
            "rollout 1 must share one reward; rows [2, 3, 4, 5] have rewards [1.0, 0.0, 0.25, 0.5]"
            in (upstream["message"])
        )
        return
    if variant == "grpo_no_normalization":
        # Nothing is shared then, so upstream does not look at siblings either.
        config = NormalizationConfig(**VARIANTS[variant], **LAYOUT)
    result = normalize_rewards(dump.samples, config, sizes)
    assert result.raw_rewards.tolist() == upstream["raw"]
    assert result.advantages.tolist() == pytest.approx(upstream["normalized"], rel=1e-6, abs=1e-6)
    # Where upstream's float32 leaves rounding, groups of equal rewards are exactly 0 here.
    equal = result.statistics.equal[result.index.row_group]
    if config.rewards_normalization:
        assert torch.count_nonzero(result.advantages[equal]) == 0


def test_every_result_of_miles_is_compared() -> None:
    assert len(list(miles_results())) == 3 * 2 * len(VARIANTS)


@pytest.mark.parametrize(
    ("name", "rows", "rollouts", "groups"),
    [
        ("miles_session_v2.pt", 58, 24, 6),
        ("miles_mainstream.pt", 58, 24, 6),
        ("miles_multi_lora.pt", 25, 14, 4),
        ("slime_dump.pt", 58, 24, 6),
    ],
)
def test_shape_of_the_dumps(name: str, rows: int, rollouts: int, groups: int) -> None:
    result = normalize_rewards(dump_of(name).samples)
    assert (result.index.num_rows, result.index.num_rollouts, result.index.num_groups) == (rows, rollouts, groups)
    assert result.index.group_source == "group_index"


def test_adapters_stand_in_for_the_recorded_sizes() -> None:
    """Adapter and group_index together name the same four groups that prompt_group_sizes records."""
    dump = dump_of("miles_multi_lora.pt")
    by_adapter = normalize_rewards(dump.samples)
    by_sizes = normalize_rewards(dump.samples, prompt_group_sizes=dump.metadata["prompt_group_sizes"])
    assert by_sizes.index.group_source == "prompt_group_sizes"
    assert by_adapter.groups == by_sizes.groups
    assert by_adapter.index.group_ids == [
        (adapter, group) for adapter in ("math-lora", "code-lora") for group in (0, 1)
    ]
    assert torch.equal(by_adapter.advantages.view(torch.int32), by_sizes.advantages.view(torch.int32))


def test_upstream_mixes_adapters_without_sizes() -> None:
    """Miles then groups by group_index alone: two groups instead of four, so its numbers differ from ours."""
    golden = GOLDEN["miles_multi_lora.pt"]["miles_pr2369"]
    rows = [
        {key: value for key, value in row.items() if key != "adapter"} for row in dump_of("miles_multi_lora.pt").samples
    ]
    mixed = golden["grpo_std_on_without_prompt_group_sizes"]["normalized"]
    assert normalize_rewards(dump_of("miles_multi_lora.pt").samples).advantages.tolist() != pytest.approx(
        mixed, abs=1e-3
    )
    assert normalize_rewards(rows).index.num_groups == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_slime_with_one_row_per_rollout(variant: str) -> None:
    """Where rows are rollouts, counting rows finds the right groups."""
    golden = GOLDEN["slime_dump.pt"]["slime"]["one_row_per_rollout_n4_b6"]
    rows = [dump_of("slime_dump.pt").samples[row] for row in golden["row_indices"]]
    result = normalize_rewards(rows, NormalizationConfig(**VARIANTS[variant], **LAYOUT))
    assert result.raw_rewards.tolist() == golden[variant]["raw"]
    assert result.advantages.tolist() == pytest.approx(golden[variant]["normalized"], rel=1e-6, abs=1e-6)
    assert result.groups == [list(range(first, first + 4)) for first in range(0, 24, 4)]


@pytest.mark.parametrize(
    ("part", "variant"),
    [
        *(("post_process_rewards", v) for v in VARIANTS if v != "grpo_no_normalization"),
        ("count_coincidence", "grpo_std_on"),
    ],
)
def test_slime_counts_rows(part: str, variant: str) -> None:
    """slime's numbers on fan-out are its rule applied to rows: one group of 58, or 29 pairs; ours are by prompt."""
    golden = GOLDEN["slime_dump.pt"]["slime"]
    pairs = part == "count_coincidence"
    upstream = golden["count_coincidence_n2_b29_grpo_std_on"] if pairs else golden[part][variant]
    rewards, size = upstream["raw"], 2 if pairs else 58
    scaled = VARIANTS[variant].get("grpo_std_normalization", "baseline" not in variant)
    by_rows = [value for first in range(0, 58, size) for value in over_rows(rewards[first : first + size], scaled)]
    assert upstream["normalized"] == pytest.approx(by_rows, abs=2e-5)
    rows = dump_of("slime_dump.pt").samples
    layout = {"n_samples_per_prompt": 2, "rollout_batch_size": 29} if pairs else LAYOUT
    ours = normalize_rewards(rows, NormalizationConfig(**VARIANTS[variant], **layout))
    one_each = golden["one_row_per_rollout_n4_b6"]
    # The first row of each rollout is what one_row_per_rollout kept: the right value of every rollout of the batch.
    assert ours.advantages[one_each["row_indices"]].tolist() == pytest.approx(one_each[variant]["normalized"], abs=1e-6)
    assert ours.rollout_advantages.tolist() == pytest.approx(one_each[variant]["normalized"], abs=1e-6)
    agree = [
        (a, b) for a, b in zip(ours.advantages.tolist(), upstream["normalized"], strict=True) if abs(a - b) <= 1e-3
    ]
    # Pairs of equal rewards and groups of equal rewards are both 0; nothing else agrees.
    assert agree == [(0.0, 0.0)] * (19 if pairs else 0)


def over_rows(rewards: list[float], scaled: bool) -> list[float]:
    """Rewards normalized over rows, as if each were a rollout; written down again here, without the library."""
    mean = math.fsum(rewards) / len(rewards)
    return [(reward - mean) / (statistics.stdev(rewards) + 1e-6 if scaled else 1.0) for reward in rewards]
