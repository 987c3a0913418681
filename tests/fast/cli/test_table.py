"""What people read of ``normalize``: the table, its widths, its notes."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import EXAMPLE, LORA, MAINSTREAM, SLIME, Run, many_groups
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from miles_norm.audit.summary import number


def sets(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--set", text)]


def test_the_table_shows_what_a_hand_computes(run: Callable[..., Run]) -> None:
    # Group 0 has four rollouts with rewards 0, 0.25, 1, 0.5 on 2, 4, 4 and 1 rows. Mean 1.75 / 4 = 0.4375; squared
    # deviations 0.19140625 + 0.03515625 + 0.31640625 + 0.00390625 = 0.546875; std sqrt(0.546875 / 3) = 0.426956.
    # Advantages from -0.4375 / 0.426957 = -1.02469 to 0.5625 / 0.426957 = 1.31746. Group 1 is 1.0 throughout.
    shown = run("normalize", EXAMPLE)
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[0] == f"{EXAMPLE}, rollout step 0"
    assert shown.lines[1] == "58 rows, 24 rollouts, 6 prompt groups (groups from group_index)"
    assert shown.lines[2] == "grpo: advantage = (reward - mean) / (std + 1e-06)"
    assert shown.lines[5].split() == ["group", "rows", "rollouts", "fan-out", "mean", "std", "min", "max", "notes"]
    assert shown.lines[6].split() == ["0", "11", "4", "1-4", "0.4375", "0.4270", "-1.0247", "1.3175"]
    assert shown.lines[7].split(maxsplit=8) == ["1", "9", "4", "1-5", "1.0000", "0", "0", "0", "all equal"]
    # 24 rollouts have 10.5 in sum, 58 rows 25.75: a mean per row is weighted by fan-out.
    assert "reward mean  0.4375 per rollout, 0.4440 per row" in shown.out
    assert "groups       2 all equal, 0 with one rollout\n" in shown.out
    assert "rollouts     24 counted, 0 excluded\n" in shown.out
    assert "rows         58 trained, 0 untrained, 0 excluded\n" in shown.out
    assert "warning" not in shown.out


@pytest.mark.parametrize("dump", [EXAMPLE, MAINSTREAM, LORA, SLIME], ids=lambda path: path.stem)
def test_eighty_columns_are_enough(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, dump: Path) -> None:
    wide = run("normalize", dump, "--set", "n_samples_per_prompt=5").out
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("normalize", dump, "--set", "n_samples_per_prompt=5")
    # The path stands on a line of its own and is not broken.
    assert max(cell_len(line) for line in shown.lines[1:]) <= 80
    assert "…" not in shown.out
    # Nothing is lost: the same words, whatever the lines. Where space is short, headers are split
    # and notes stand below their line, without a header.
    assert set(wide.split()) - set(shown.out.split()) <= {"rollouts", "fan-out", "notes"}


def test_long_ids_and_large_numbers_keep_every_character(
    run: Callable[..., Run], jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"3f2a1c9b-7d1e-4a55-9c0d-1b2c3d4e5f{n:02d}" for n in range(3)]
    path = jsonl(*({"group_index": name, "rollout_id": k, "reward": k * 1e6} for name in names for k in range(4)))
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("normalize", path, "--set", "advantage_estimator=dr_grpo", "--set", "n_samples_per_prompt=5")
    table = shown.lines[7:16]
    assert max(map(len, table)) <= 80
    # Rewards 0, 1e6, 2e6, 3e6: mean 1.5e6, squared deviations 5e12, std sqrt(5e12 / 3) = 1.29099e6.
    assert table[0].split()[1:] == ["4", "4", "1", "1.5e+06", "1.291e+06", "-1.5e+06", "1.5e+06"]
    assert table[0].split()[0] + table[1].split()[0] == names[0]
    assert table[2] == "    incomplete 4/5"


def test_notes_say_what_deserves_a_look(run: Callable[..., Run]) -> None:
    shown = run("normalize", MAINSTREAM, "--set", "n_samples_per_prompt=5", "--set", "untrained_rollouts=exclude")
    notes = [line.split(maxsplit=8)[8] for line in shown.lines[7:13]]
    assert notes == [
        "incomplete 4/5, siblings disagree",
        "all equal, incomplete 4/5, siblings disagree",
        "incomplete 4/5, 1 excluded: untrained",
        "incomplete 4/5, 1 excluded: untrained, siblings disagree, 1 row untrained",
        "all equal, incomplete 4/5, 1 row untrained",
        "incomplete 4/5, siblings disagree, 2 rows untrained",
    ]
    assert "not at their defaults: untrained_rollouts=exclude, n_samples_per_prompt=5\n" in shown.out
    assert "groups       2 all equal, 0 with one rollout, 6 incomplete\n" in shown.out
    assert "rollouts     22 counted, 2 excluded (2 untrained)\n" in shown.out
    # 58 rows; rollouts 11 and 13 have three, and four rows of counted rollouts are removed or masked.
    assert "rows         51 trained, 4 untrained (4 removed or masked), 3 excluded\n" in shown.out


def test_each_warning_is_printed_once_and_the_logger_is_left_as_it_was(run: Callable[..., Run]) -> None:
    logger = logging.getLogger("miles_norm")
    before = (logger.handlers, logger.propagate)
    shown = run("normalize", MAINSTREAM)
    assert shown.err == ""
    assert shown.out.count("siblings of rollouts 1, 4, 12, 15, 20, 23 have different rewards") == 1
    assert shown.out.count("warning: ") == 2
    assert (logger.handlers, logger.propagate) == before


def test_adapters_and_the_sizes_that_a_dump_records(run: Callable[..., Run]) -> None:
    recorded = run("normalize", LORA)
    assert "(groups from prompt_group_sizes in the dump's metadata)" in recorded.lines[1]
    assert [line.split()[:3] for line in recorded.lines[6:10]] == [
        ["0", "math-lora", "8"],
        ["1", "math-lora", "6"],
        ["2", "code-lora", "5"],
        ["3", "code-lora", "6"],
    ]
    by_id = run("normalize", LORA, "--prompt-group-sizes", "none")
    assert "(groups from adapter and group_index)" in by_id.lines[1]
    names = ["math-lora/0", "math-lora/1", "code-lora/0", "code-lora/1"]
    assert [line.split()[0] for line in by_id.lines[6:10]] == names
    # The sizes record the same groups, so the numbers agree.
    assert [line.split()[-5:] for line in by_id.lines[6:9]] == [line.split()[-5:] for line in recorded.lines[6:9]]
    given = run("normalize", LORA, "--prompt-group-sizes", "14, 11")
    assert "2 prompt groups (groups from --prompt-group-sizes)" in given.lines[1]


def test_empty_groups_have_a_line(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl({"reward": 0.0}, {"reward": 1.0})
    shown = run("normalize", path, "--prompt-group-sizes", "0,2,0")
    assert [line.split() for line in shown.lines[6:9]] == [
        ["0", "0", "0", "-", "-", "-", "-", "-", "no", "rollout"],
        ["1", "2", "2", "1", "0.5000", "0.7071", "-0.7071", "0.7071"],
        ["2", "0", "0", "-", "-", "-", "-", "-", "no", "rollout"],
    ]
    assert "0 with one rollout, 2 without a rollout" in shown.out


def test_unscored_rollouts_are_left_out_and_said_so(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    rewards = [0.0, float("nan"), 1.0, None, 0.25]
    path = jsonl(*({"group_index": k // 3, "rollout_id": k, "reward": reward} for k, reward in enumerate(rewards)))
    refused = run("normalize", path)
    assert refused.code == 2
    assert "reward of rows 1, 3\n  got:      row 1: nan; row 3: None\n" in refused.err
    shown = run("normalize", path, "--set", "missing_reward=exclude")
    assert shown.lines[7].split(maxsplit=8)[8] == "1 excluded: unscored"
    assert shown.lines[8].split(maxsplit=8)[8] == "one rollout, 1 excluded: unscored"
    assert "rollouts     3 counted, 2 excluded (2 unscored)\n" in shown.out
    assert "rows         3 trained, 0 untrained, 2 excluded\n" in shown.out
    assert "unscored     2 of 5 rows (missing_reward is exclude)\n" in shown.out


def test_padding_counts_in_nothing_but_rows(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    real = [{"group_index": 0, "rollout_id": k, "reward": k} for k in range(2)]
    padding = {"group_index": 0, "reward": None, "is_padding": True}
    shown = run("normalize", jsonl(*real, {**padding, "rollout_id": 1}, {**padding, "rollout_id": 9}))
    assert shown.lines[1].startswith("4 rows, 2 rollouts, 1 prompt group ")
    expected = ["0", "4", "2", "1", "0.5000", "0.7071", "-0.7071", "0.7071", "2 padding rows"]
    assert shown.lines[6].split(maxsplit=8) == expected
    assert "rows         2 trained, 0 untrained, 0 excluded, 2 padding\n" in shown.out


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        ("zero_std_tolerance=0.5", "all equal within tolerance"),
        ("min_group_size=3", "2 excluded: small group"),
        ("n_samples_per_prompt=2", None),
    ],
)
def test_notes_that_settings_decide(
    run: Callable[..., Run], jsonl: Callable[..., Path], setting: str, note: str | None
) -> None:
    path = jsonl(*({"group_index": 0, "rollout_id": k, "reward": 1.0 + k / 2} for k in range(2)))
    line = next(line for line in run("normalize", path, "--set", setting).lines if line.startswith("0 "))
    assert line.split(maxsplit=8)[8:] == ([note] if note else [])


MASKED, TRUNCATED = {"loss_mask": [0, 0]}, {"status": "truncated"}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], None),
        (["missing_reward=exclude"], "5 trained, 3 untrained (3 removed or masked), 1 excluded, 1 padding"),
        # An excluded rollout takes its rows along, whatever else is the matter with them.
        (
            ["missing_reward=exclude", "untrained_rollouts=exclude"],
            "5 trained, 1 untrained (1 removed or masked), 3 excluded, 1 padding",
        ),
        (
            ["missing_reward=exclude", "truncated_rollouts=untrain"],
            "4 trained, 4 untrained (3 removed or masked, 1 truncated), 1 excluded, 1 padding",
        ),
        (
            ["missing_reward=zero", "truncated_rollouts=untrain", "untrained_rollouts=exclude"],
            "5 trained, 1 untrained (1 removed or masked), 3 excluded, 1 padding",
        ),
        (["missing_reward=exclude", "min_group_size=9"], "0 trained, 0 untrained, 9 excluded, 1 padding"),
        (
            ["missing_reward=exclude", "advantage_estimator=ppo"],
            "4 trained, 4 untrained (3 removed or masked, 1 unscored), 1 excluded, 1 padding",
        ),
    ],
)
def test_every_row_is_in_one_state(
    run: Callable[..., Run], jsonl: Callable[..., Path], settings: list[str], line: str | None
) -> None:
    rows = [
        {"rollout_id": 0, "reward": 1},
        {"rollout_id": 0, "reward": None},
        {"rollout_id": 0, "reward": 1, **MASKED},
        {"rollout_id": 1, "reward": None},
        {"rollout_id": 2, "reward": 0, "remove_sample": True},
        {"rollout_id": 2, "reward": 0, **MASKED},
        {"rollout_id": 3, "reward": 0, **TRUNCATED},
        {"rollout_id": 4, "reward": 1},
        {"rollout_id": 5, "reward": 1},
        {"rollout_id": 5, "reward": None, "is_padding": True},
    ]
    shown = run("normalize", jsonl(*({"group_index": 0, **row} for row in rows)), *sets(*settings))
    assert shown.code == (2 if line is None else 0)
    assert line is None or f"rows         {line}\n" in shown.out
    numbers = [int(word) for word in re.sub(r" \(.*?\)", "", line or "10").split() if word.isdigit()]
    assert sum(numbers) == 10


@pytest.mark.parametrize("policy", ["mainstream", "shared", "max"])
def test_siblings_within_the_tolerance_of_shared_agree(
    run: Callable[..., Run], jsonl: Callable[..., Path], policy: str
) -> None:
    rows = [(0, 1.0), (0, 1.0 + 1e-9), (1, 0.0)]
    path = jsonl(*({"group_index": 0, "rollout_id": name, "reward": reward} for name, reward in rows))
    tolerance = ["shared_reward_tolerance=1e-6"] if policy == "shared" else []
    given = sets(f"rollout_reward={policy}", *tolerance)
    for command in (("normalize", path), ("explain", path, "--group", 0)):
        assert ("siblings disagree" in run(*command, *given).out) == (policy != "shared")


def test_only_notable_groups_unless_all_are_asked_for(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(*many_groups(200))
    shown = run("normalize", path)
    names = [line.split()[0] for line in shown.lines if line.startswith("p") and line[1].isdigit()]
    assert len(names) == 40
    assert names == sorted(names)
    # One rollout is unusual, 0, 0, 0, 100 has the largest advantage, and what is all equal comes last.
    assert {"p007", "p123"} <= set(names)
    assert not {f"p{group:03d}" for group in range(0, 200, 10)} & set(names)
    how = (
        "40 of 200 groups, in the order of the dump: those with unusual notes were chosen first, then those with the l"
    )
    assert how in shown.out
    assert "groups       20 all equal, 1 with one rollout\n" in shown.out
    complete = run("normalize", path, "--all")
    assert sum(line.startswith("p") for line in complete.lines) == 200
    assert "of 200 groups" not in complete.out


def test_estimators_that_pass_rewards_through(run: Callable[..., Run]) -> None:
    shown = run("normalize", EXAMPLE, "--set", "advantage_estimator=ppo")
    assert shown.lines[2] == "ppo: rows keep their own rewards"
    assert shown.lines[6].split()[-2:] == ["0", "1.0000"]


def test_ids_cannot_move_the_cursor(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(*({"group_index": "[red]\x1b[2J:boom:", "rollout_id": k, "reward": k} for k in range(2)))
    shown = run("normalize", path)
    assert "\x1b" not in shown.out
    assert "[red]\\x1b[2J:boom:" in shown.out


@given(st.floats(-1e300, 1e300))
def test_numbers_are_short_and_0_means_0(value: float) -> None:
    text = number(value)
    assert len(text) <= 12
    assert (text == "0") == (value == 0)
    assert float(text) == pytest.approx(value, rel=0.005, abs=5e-5 if abs(value) >= 1e-3 else 0)
