"""Planted faults, each found and named with its rows and the setting that mends it; a clean dump has none."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, LORA, MAINSTREAM, SLIME

from miles_norm import NormalizationConfig, RolloutDump, read_dump, write_dump
from miles_norm.audit import AuditedStep, Finding, audit_dumps, audit_rows
from miles_norm.audit.findings import CHECKS
from miles_norm.audit.tolerant import normalize_tolerantly
from miles_norm.columns import columns_from_rows
from miles_norm.errors import ConfigError, GroupingError, MissingRewardError, RewardError

Row = dict[str, Any]


def clean_rows() -> list[Row]:
    """Four prompts of four rollouts, each of two rows with tokens of their own; every rollout has one reward."""
    rows = []
    for number in range(16):
        for turn in range(2):
            tokens = [number, turn, 7, 8, 9]
            row = {"group_index": number // 4, "rollout_id": number, "index": number, "reward": float(number % 2)}
            rows.append(row | {"tokens": tokens, "loss_mask": [0, 1, 1], "response_length": 3, "status": "completed"})
    return rows


def found(rows: list[Row], name: str | None = None, sizes: Any = None, **settings: Any) -> dict[str, Finding]:
    step = audit_rows(rows, NormalizationConfig(**settings), prompt_group_sizes=sizes)
    findings = {finding.name: finding for finding in step.findings}
    assert name is None or name in findings, f"{name} is not among {list(findings)}"
    return findings


def check(finding: Finding, rows: list[int], *texts: str) -> None:
    assert list(finding.rows) == rows
    for text in texts:
        assert text.lower() in str(finding).lower(), finding


def test_a_clean_dump_has_no_finding() -> None:
    assert found(clean_rows()) == {}
    assert found(clean_rows(), rollout_reward="shared", n_samples_per_prompt=4, rollout_batch_size=4) == {}
    assert found(clean_rows(), sizes=[8, 8, 8, 8]) == {}


@pytest.mark.parametrize("baseline", ["miles-2369", "miles-2498", "agent-lightning"])
def test_a_clean_dump_has_none_against_what_counts_rollouts_either(baseline: str) -> None:
    assert audit_rows(clean_rows(), baseline=baseline).findings == ()


def lose_groups(rows: list[Row]) -> None:
    for row in rows[3:6]:
        row["group_index"] = None


def disagree(rows: list[Row]) -> None:
    rows[5]["reward"] = 0.5


def nan(rows: list[Row]) -> None:
    rows[2]["reward"], rows[3]["reward"], rows[9]["reward"] = math.nan, math.nan, None


def copy_rows(rows: list[Row]) -> None:
    rows += [copy.deepcopy(rows[0]), copy.deepcopy(rows[1])]


def collide(rows: list[Row]) -> None:
    for row in rows[30:]:
        row["rollout_id"] = 3


def share_an_index(rows: list[Row]) -> None:
    rows[6]["rollout_id"] = rows[7]["rollout_id"] = None
    for row in rows[4:6]:
        row["rollout_id"], row["index"] = 3, 2


def lose_ids(rows: list[Row]) -> None:
    for row in rows[6:8]:
        row["rollout_id"] = row["index"] = None


def mask_wrong(rows: list[Row]) -> None:
    rows[4]["response_length"] = 9


def remove(rows: list[Row]) -> None:
    for row in rows[4:6]:
        row["remove_sample"] = True


def lose_rollout(rows: list[Row]) -> None:
    del rows[30:]


FAULTS: dict[str, tuple[Callable[[list[Row]], None], list[int], tuple[str, ...]]] = {
    "guessed_groups": (lose_groups, [3, 4, 5], ("rows 3, 4, 5 lack group_index", "pass prompt_group_sizes")),
    "disagreeing_siblings": (disagree, [4, 5], ("rollout 2 have different rewards", "rollout_reward", "shared")),
    "unscored_rewards": (nan, [2, 3, 9], ("rows 2, 3, 9 are None, NaN or infinite", "missing_reward to exclude")),
    "duplicate_padding": (copy_rows, [32, 33], ("rows 32, 33 repeat another row of the same rollout", "is_padding")),
    "collided_ids": (collide, [6, 7, 30, 31], ("rollout id 3 is used in several prompt groups", "set rollout_id")),
    "missing_ids": (lose_ids, [6, 7], ("rows 6, 7 have neither rollout_id nor index", "set rollout_id, or index")),
    "mask_length": (mask_wrong, [], ("loss_mask of row 4 has another length", "response_length")),
    "untrained_rollouts": (remove, [4, 5], ("Rollout 2 has no trainable token", "untrained_rollouts: exclude")),
    "incomplete_groups": (lose_rollout, list(range(24, 30)), ("group 3 has fewer rollouts than 4", "min_group_size")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(name: str) -> None:
    plant, rows, texts = FAULTS[name]
    dump = clean_rows()
    plant(dump)
    findings = found(dump, name)
    check(findings[name], rows, *texts)
    # A lost id leaves siblings alone, a copy adds a row, lost groups and a lost half change what counting rows gives.
    consequences = {"changed_advantages", "fan_out_weight"} | (
        {"incomplete_groups"} if name == "collided_ids" else set()
    )
    assert set(findings) - consequences <= {name}


def test_stale_sizes() -> None:
    summed = found(clean_rows(), "stale_sizes", sizes=[8, 8, 8])
    check(summed["stale_sizes"], list(range(32)), "3 sizes that sum to 24", "ignored here", "--prompt-group-sizes none")
    shifted = found(clean_rows(), "stale_sizes", sizes=[10, 6, 8, 8])
    check(shifted["stale_sizes"], list(range(10)), "different group_index are in group 0", "--prompt-group-sizes none")
    assert shifted["stale_sizes"].groups == ("0",)
    assert "no list" in str(found(clean_rows(), "stale_sizes", sizes=5)["stale_sizes"])


def test_an_index_that_equals_another_rollout_id() -> None:
    rows = clean_rows()
    share_an_index(rows)
    check(
        found(rows, "collided_ids")["collided_ids"], [4, 5, 6, 7], "rows 4, 5, 6, 7 count as siblings", "on every row"
    )


def test_all_faults_at_once() -> None:
    """None of them hides another one."""
    rows = clean_rows()
    for plant in (disagree, nan, collide, copy_rows):
        plant(rows)
    findings = found(rows, sizes=[8, 8, 8])
    planted = {"stale_sizes", "collided_ids", "duplicate_padding", "unscored_rewards", "disagreeing_siblings"}
    assert planted <= set(findings)
    assert list(findings) == [name for name in CHECKS if name in findings]
    rows = clean_rows()
    for plant in (lose_groups, nan, disagree):
        plant(rows)
    assert {"guessed_groups", "unscored_rewards", "disagreeing_siblings"} <= set(found(rows, sizes=[1, 2]))


def test_copies_that_are_marked_as_padding_are_right() -> None:
    rows = clean_rows()
    copy_rows(rows)
    for row in rows[32:]:
        row["is_padding"] = True
    assert found(rows) == {}


def test_rows_of_other_rollouts_may_have_equal_tokens() -> None:
    """Two rollouts of a prompt may say the same."""
    rows = clean_rows()
    rows[2]["tokens"] = rows[0]["tokens"]
    assert found(rows) == {}


def test_guesses_that_ids_contradict() -> None:
    rows = [dict(row, group_index=None) for row in clean_rows()]
    finding = found(rows, "guessed_groups", n_samples_per_prompt=8, rollout_batch_size=4)["guessed_groups"]
    check(finding, list(range(32)), "no row has group_index", "4 groups of 8 contiguous rows", "contradict")


def test_zero_variance_needs_a_share_of_the_groups() -> None:
    rows = clean_rows()
    for row in rows[:8]:
        row["reward"] = 1.0
    finding = found(rows, "zero_variance")["zero_variance"]
    check(
        finding,
        list(range(8)),
        "1 of 4 prompt groups (25%)",
        "8 rows of group 0",
        "zero_variance_groups: drop_from_loss",
    )
    more = rows + [
        dict(row, group_index=row["group_index"] + 10, rollout_id=row["rollout_id"] + 100) for row in clean_rows()
    ]
    assert "zero_variance" not in found(more)


def test_nothing_trains() -> None:
    equal = [dict(row, reward=1.0) for row in clean_rows()]
    assert "all advantages are 0" in str(found(equal, "nothing_trains")["nothing_trains"])
    masked = [dict(row, loss_mask=[0, 0, 0]) for row in clean_rows()]
    assert "no row has a trainable token" in str(found(masked, "nothing_trains")["nothing_trains"])


def test_groups_of_one() -> None:
    rows = [dict(row, group_index=row["rollout_id"]) for row in clean_rows()]
    finding = found(rows, "single_rollout_groups")["single_rollout_groups"]
    assert "16 of 16 prompt groups have one counted rollout" in finding.problem
    assert "group_key (group_index) names the prompt" in finding.remedy


def test_nearly_equal_rewards() -> None:
    rows = clean_rows()
    for row in rows[:2]:
        row["reward"] = 1.0
    for number, row in enumerate(rows[:8]):
        row["reward"] = 1.0 + (1e-9 if number < 2 else 0.0)
    finding = found(rows, "nearly_equal_rewards")["nearly_equal_rewards"]
    assert "prompt group 0 differ by at most 1e-06" in finding.problem
    assert "zero_std_tolerance: 1e-6" in finding.remedy


def test_fan_out_that_follows_failure() -> None:
    """One success of one row and a failure of three: by rows 1/4, so the success gets 1.5, not 0.71."""
    rows = [
        {"group_index": 0, "rollout_id": number, "reward": reward, "response_length": 4}
        for number, reward, fan_out in ((0, 1.0, 1), (1, 0.0, 3))
        for _ in range(fan_out)
    ]
    findings = found(rows)
    # Mean 1/4, std 1/2: 1.5 and -0.5 instead of 0.7071 and -0.7071; changes 0.7929 and 0.2071 three times.
    assert "advantages change by 0.3536 on average and 0.7929 at most" in findings["changed_advantages"].problem
    # Masses 1/4 and 3/4: half and one and a half of an equal share.
    assert "0.5000 to 1.5000 times an equal share" in findings["fan_out_weight"].problem
    assert findings["fan_out_weight"].rows == (1, 2, 3)
    assert "rollout_mean" in findings["fan_out_weight"].remedy


def test_rows_that_turn_are_named() -> None:
    step = audit_rows(read_dump(MAINSTREAM).samples)
    finding = next(finding for finding in step.findings if finding.name == "changed_advantages")
    assert finding.rows == (2, 10, 25, 42, 44, 45, 46)
    assert "7 of 51 trained rows are pushed the other way" in finding.problem


def test_a_baseline_that_stops_is_a_finding() -> None:
    rows = clean_rows()
    disagree(rows)
    step = audit_rows(rows, baseline="miles-2498")
    finding = next(finding for finding in step.findings if finding.name == "baseline_refuses")
    check(finding, [4, 5], "baseline miles-2498 does not take these rows", "one reward on all rows of a rollout")
    assert not any("vs_" in name for name in step.metrics)


def test_a_baseline_that_spreads_nan() -> None:
    rows = clean_rows()
    nan(rows)
    rows[9]["reward"] = 1.0
    step = audit_rows(rows, baseline="verl")
    finding = next(finding for finding in step.findings if finding.name == "changed_advantages")
    # Group 0 has eight rows, and the two of its rollout without a reward are not trained here.
    assert "6 rows get no finite advantage" in finding.problem
    assert step.metrics["miles_norm/vs_verl/nonfinite_rows"] == 6


def test_a_setting_that_the_baseline_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="baseline 'verl'"):
        audit_rows(clean_rows(), NormalizationConfig(advantage_estimator="rloo"), baseline="verl")


def test_rows_and_groups_of_a_finding_are_bounded() -> None:
    rows = [{"reward": float(n % 2), "response_length": 1, "rollout_id": n} for n in range(1000)]
    finding = found(rows, "guessed_groups")["guessed_groups"]
    assert len(finding.rows) == 200
    assert "no row has group_index" in finding.problem


def test_real_dumps() -> None:
    names = {
        path.stem: [finding.name for finding in audit_dumps([path]).steps[0].findings]
        for path in (EXAMPLE, LORA, SLIME)
    }
    usual = ["changed_advantages", "fan_out_weight", "zero_variance"]
    assert names == {"miles_session_v2": usual, "miles_multi_lora": ["collided_ids", *usual], "slime_dump": usual}


# What is relaxed so that the audit can go on


@pytest.mark.parametrize(
    ("plant", "settings", "sizes", "relaxed", "error"),
    [
        (nan, {}, None, {"missing_reward": "exclude"}, MissingRewardError),
        (disagree, {"rollout_reward": "shared"}, None, {"rollout_reward": "mainstream"}, RewardError),
        (lose_groups, {"group_fallback": "error"}, None, {"group_fallback": "single_group"}, GroupingError),
        (lambda rows: None, {}, [1], {}, GroupingError),
        (
            lambda rows: rows.__delitem__(slice(2, None)),
            {"singleton": "error"},
            None,
            {"singleton": "zero"},
            GroupingError,
        ),
    ],
    ids=["unscored", "shared", "fallback", "sizes", "singleton"],
)
def test_what_is_relaxed(plant: Any, settings: Row, sizes: Any, relaxed: Row, error: type[Exception]) -> None:
    rows = clean_rows()
    plant(rows)
    config = NormalizationConfig(**settings)
    result, refused = normalize_tolerantly(columns_from_rows(rows, config), config, sizes)
    assert [type(each) for each in refused] == [error] or isinstance(refused[0], error)
    assert result.config == NormalizationConfig(**{**settings, **relaxed})


def test_what_cannot_be_relaxed_is_raised() -> None:
    config = NormalizationConfig(advantage_estimator="maxrl")
    rows = [dict(row, reward=-1.0 * row["reward"]) for row in clean_rows()]
    with pytest.raises(RewardError, match="reward of"):
        normalize_tolerantly(columns_from_rows(rows, config), config)


# From files


def test_stale_sizes_in_a_dump_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rollout_3.pt"
    write_dump(RolloutDump(clean_rows(), 3, {"prompt_group_sizes": [8, 8]}), path)
    step: AuditedStep = audit_dumps([path]).steps[0]
    assert (step.name, step.rollout_id, step.group_source) == ("rollout_3.pt", 3, "group_index")
    assert [finding.name for finding in step.findings] == ["stale_sizes"]
    assert audit_dumps([path], prompt_group_sizes=None).findings == {}
    assert audit_dumps([path], prompt_group_sizes=[8, 8, 8, 8]).steps[0].group_source == "prompt_group_sizes"


def test_a_dump_with_rewards_of_a_wrong_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"reward": "good", "response_length": 1}) + "\n", encoding="utf-8")
    with pytest.raises(RewardError, match=r"bad.jsonl: reward of row 0") as caught:
        audit_dumps([EXAMPLE, path])
    assert caught.value.rows == (0,)
