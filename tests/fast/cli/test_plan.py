"""``miles-norm plan``: updates, masses, and what is in none."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import EXAMPLE, Run

from miles_norm import UpdateConfig


@pytest.fixture(name="dump")
def fixture_dump(jsonl: Callable[..., Path]) -> Path:
    """Rollouts 0, 1, 2 on two, three rows and one row of five tokens; a padding row; group 1 is all equal."""
    rows = [
        {"group_index": group, "rollout_id": f"r{rollout}", "reward": reward}
        for group, rollout, reward, fan_out in ((0, 0, 1.0, 2), (0, 1, 0.0, 3), (1, 2, 1.0, 1))
        for _ in range(fan_out)
    ]
    return jsonl(*rows, {"group_index": 1, "rollout_id": "r2", "reward": 1.0, "is_padding": True})


def test_the_table_shows_what_a_hand_computes(run: Callable[..., Run], dump: Path) -> None:
    # Update 0: rollouts r0 and r1 on 5 rows, mass 2/2 by rollouts and 2/5 by rows; update 1: r2 alone, 1 and 1.
    shown = run("plan", dump, "--rollouts-per-update", 2)
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[1:3] == [
        "7 rows, 3 rollouts, 3 counted",
        "2 rollouts per update, leftover smaller_update: 2 updates",
    ]
    assert [line.split() for line in shown.lines[4:9]] == [
        ["mass", "by"],
        ["update", "rollouts", "rows", "tokens", "rollouts", "trained", "rows"],
        ["0", "2", "5", "25", "1.0000", "0.4000"],
        ["1", "1", "1", "5", "1.0000", "1.0000"],
        ["epoch", "3", "6", "30", "2.0000", "1.4000"],
    ]
    assert shown.lines[10:] == ["dropped whole:   nothing", "dropped in part: nothing", "rows dropped:    0"]


@pytest.mark.parametrize(
    ("leftover", "dropped", "carried", "rows"), [("drop", ["r2"], [], [5]), ("carry", [], ["r2"], [])]
)
def test_what_fills_no_update(
    run: Callable[..., Run], dump: Path, leftover: str, dropped: list[str], carried: list[str], rows: list[int]
) -> None:
    arguments = ("plan", dump, "--rollouts-per-update", 2, "--leftover", leftover)
    found = run(*arguments, "--json").json
    assert found["num_updates"] == 1
    assert found["updates"][0] == {
        "rows": [0, 1, 2, 3, 4],
        "rollouts": 2,
        "trainable_tokens": 25,
        "mass": pytest.approx(1.0),
        "mass_by_trained_rows": pytest.approx(0.4),
    }
    assert (found["dropped_rollouts"], found["carried_rollouts"]) == (dropped, carried)
    assert found["dropped_rows"] == rows
    assert found["epoch_mass"] == pytest.approx(1.0)
    shown = run(*arguments).lines
    assert f"dropped whole:   {'rollout r2' if dropped else 'nothing'}" in shown
    assert ("carried:         rollout r2" in shown) == bool(carried)


def test_by_rows(run: Callable[..., Run], dump: Path) -> None:
    """Four of six rows are kept; r2 of the equal group goes first, and one row of another rollout with it."""
    arguments = ("plan", dump, "--unit", "rows", "--rows-per-update", 4, "--seed", 3)
    found = run(*arguments, "--json").json
    assert found["dropped_rollouts"] == ["r2"]
    assert found["partly_dropped_rollouts"] in (["r0"], ["r1"])
    assert len(found["dropped_rows"]) == 2
    assert sorted(found["dropped_rows"] + found["updates"][0]["rows"]) == [0, 1, 2, 3, 4, 5]
    assert found["config"]["seed"] == 3
    # Both r0 and r1 are on the four rows: 2/4 by rows.
    assert found["epoch_mass_by_trained_rows"] == pytest.approx(0.5)
    shown = run(*arguments, "--max-updates", 1)
    assert shown.lines[2] == "4 rows per update, at most 1 update: 1 update"
    assert f"dropped in part: rollout {found['partly_dropped_rollouts'][0]}" in shown.lines


def test_rows_that_drop_first_took_out_are_named(run: Callable[..., Run], dump: Path) -> None:
    """To the advantages of what is left they are padding, but the dump holds them as rows."""
    arguments = ("plan", dump, "--unit", "rows", "--rows-per-update", 4, "--json")
    first, last = (run(*arguments, "--order", order).json for order in ("normalize_first", "drop_first"))
    assert len(first["dropped_rows"]) == 2
    assert last["dropped_rows"] == first["dropped_rows"]


def test_micro_batches(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    """Lengths 6, 7, 8 and 9 in batches of at most 14 tokens, longest first: 9; 8 and 6; 7. A padding row has none."""
    rows = [
        {"group_index": 0, "rollout_id": n // 2, "reward": n // 2, "tokens": [1] * (6 + n), "response_length": 5}
        for n in range(4)
    ]
    path = jsonl(*rows, {"group_index": 0, "rollout_id": 0, "reward": 0, "is_padding": True})
    arguments = ("plan", path, "--max-tokens-per-gpu", 14)
    [update] = run(*arguments, "--json").json["updates"]
    assert update["micro_batches"] == [[3], [2, 0], [1]]
    shown = run(*arguments)
    assert [line.split() for line in shown.lines[4:8]] == [
        ["micro-", "mass", "by"],
        ["update", "rollouts", "rows", "tokens", "batches", "rollouts", "trained", "rows"],
        ["0", "2", "4", "20", "3", "1.0000", "0.5000"],
        ["epoch", "2", "4", "20", "3", "1.0000", "0.5000"],
    ]
    small = run("plan", path, "--max-tokens-per-gpu", 8)
    assert (small.code, "row 3: 9 tokens, with max_tokens_per_gpu=8" in small.err) == (2, True)


def test_micro_batches_need_tokens(run: Callable[..., Run], dump: Path) -> None:
    refused = run("plan", dump, "--max-tokens-per-gpu", 100)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("tokens of rows 0, 1, 2, 3, 4, 5\n")


def test_every_setting_of_updates_is_an_option(run: Callable[..., Run]) -> None:
    shown = run("plan", "--help").out
    assert [name for name in UpdateConfig.model_fields if f"--{name.replace('_', '-')}" not in shown] == []


def test_all_in_one_update(run: Callable[..., Run]) -> None:
    shown = run("plan", EXAMPLE)
    assert shown.lines[2] == "all rollouts in one update: 1 update"
    # 24 rollouts on 58 rows.
    assert shown.lines[6].split() == ["0", "24", "58", "1098", "1.0000", "0.4138"]


def test_nothing_fits(run: Callable[..., Run], dump: Path) -> None:
    shown = run("plan", dump, "--unit", "rows", "--rows-per-update", 100)
    assert shown.code == 0
    assert "epoch          0     0       0         0             0" in shown.lines
    assert "dropped whole:   rollouts r0, r1, r2" in shown.lines


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--unit", "rows"), "unit='rows' without rows_per_update"),
        (("--max-updates", 2), "max_updates with unit='rollouts'"),
        (("--leftover", "keep", "--rollouts-per-update", 2), "leftover='keep'"),
        (("--rollouts-per-update", 0), "rollouts_per_update=0"),
    ],
)
def test_options_that_contradict_each_other(
    run: Callable[..., Run], dump: Path, arguments: tuple[object, ...], text: str
) -> None:
    refused = run("plan", dump, *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert text in refused.err


def test_help_has_an_example(run: Callable[..., Run]) -> None:
    assert "Example: miles-norm plan" in run("plan", "--help").out
