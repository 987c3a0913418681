"""``miles-norm diff``: configs, baselines and versions on the same rows; exit code 1 on change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, LORA, MAINSTREAM, ROOT, SLIME, Run

GRPO, DR_GRPO = ROOT / "configs/grpo.yaml", ROOT / "configs/dr_grpo.yaml"


def test_two_configs(run: Callable[..., Run]) -> None:
    shown = run("diff", GRPO, DR_GRPO, "--dump", EXAMPLE)
    assert (shown.code, shown.err) == (1, "")
    assert shown.lines[:5] == [
        f"{GRPO} -> {DR_GRPO} on {EXAMPLE}",
        "setting advantage_estimator: grpo -> dr_grpo",
        "setting zero_std_tolerance: 0 -> 1e-07",
        # Of 58 rows 18 are in the two groups of equal rewards, and rollout 22 has the mean of its group on three rows.
        "37 of 58 rows change, of 15 of 24 rollouts in 4 of 6 prompt groups",
        "by 0.4812 on average, 0.9142 at most; 0 turn their sign",
    ]
    # The one success of group 5 is 0.5 above the mean.
    assert shown.lines[7].split() == ["5", "23", "55-57", "1.4142", "0.5000", "0.9142"]


def test_no_change_is_0(run: Callable[..., Run], tmp_path: Path) -> None:
    same = tmp_path / "same.yaml"
    same.write_text("advantage_estimator: gspo\n", encoding="utf-8")
    shown = run("diff", GRPO, same, "--dump", EXAMPLE)
    assert shown.code == 0
    assert shown.lines[1:] == ["setting advantage_estimator: grpo -> gspo", "no change on 58 rows"]


def test_a_config_against_baselines(run: Callable[..., Run]) -> None:
    assert run("diff", GRPO, "miles-2369", "--dump", MAINSTREAM).lines[-1] == "no change on 58 rows"
    shown = run("diff", "rows", GRPO, "--dump", MAINSTREAM)
    assert shown.code == 1
    assert "turn their sign" in shown.out
    # Rollout 23 of group 5: its mainstream row has 1.0, the others 0.
    assert "1 row turned" in next(line for line in shown.lines if line.split()[:2] == ["5", "23"])


def test_a_baseline_that_gives_no_number(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    """slime divides by the deviation of one row."""
    layout = ("--set", "n_samples_per_prompt=1", "--set", "rollout_batch_size=2")
    path = jsonl({"group_index": 0, "index": 0, "reward": 1.0}, {"group_index": 1, "index": 1, "reward": 0.0})
    arguments = ("diff", "rows", "slime", "--dump", path, *layout)
    shown = run(*arguments)
    assert (shown.code, "2 are a number on one side only" in shown.out) == (1, True)
    assert run(*arguments, "--json").json["rollouts"][0]["largest_change"] is None


def test_versions_of_a_dump(run: Callable[..., Run], tmp_path: Path) -> None:
    """What two versions wrote with ``normalize -o`` is compared as it stands in the files."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for path in (old, new):
        assert run("normalize", EXAMPLE, "-o", path).code == 0
    assert run("diff", old, new).lines == [f"{old} -> {new}", "no change on 58 rows"]
    rows = [json.loads(line) for line in new.read_text(encoding="utf-8").splitlines()]
    rows[3]["advantage"] = -rows[3]["advantage"]
    rows[10]["trained"] = False
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = run("diff", old, new, "--json")
    assert found.code == 1
    assert found.json["dump"] is None
    assert (found.json["changed_rows"], found.json["sign_flips"], found.json["retrained_rows"]) == (2, 1, 1)
    assert [(change["rollout"], change["rows"]) for change in found.json["rollouts"]] == [("1", [3]), ("3", [10])]
    shown = run("diff", old, new)
    assert "1 are trained on one side only" in shown.out
    assert "1 row turned" in shown.out
    assert "1 row trained on one side" in shown.out


def test_a_dump_without_advantages_is_normalized(run: Callable[..., Run], tmp_path: Path) -> None:
    written = tmp_path / "written.jsonl"
    run("normalize", EXAMPLE, "-o", written)
    assert run("diff", EXAMPLE, written).code == 0
    changed = run("diff", EXAMPLE, written, "--set", "advantage_estimator=dr_grpo")
    assert changed.code == 1


def test_advantages_on_some_rows_only(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    rows: list[dict[str, Any]] = [{"group_index": 0, "index": n, "reward": n % 2, "advantage": 1.0} for n in range(3)]
    rows[1]["advantage"] = "high"
    refused = run("diff", jsonl(*rows), EXAMPLE)
    assert (refused.code, refused.out) == (2, "")
    assert "row 1 without a number as advantage" in refused.err


def test_a_bad_row_is_of_one_of_two_dumps(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    def dump(name: str, reward: Any) -> Path:
        rows = [{"group_index": 0, "index": n, "reward": reward if n == 1 else 0.5} for n in range(3)]
        return jsonl(*rows, name=name)

    good, bad = dump("good.jsonl", 1.0), dump("bad.jsonl", None)
    for sides in ((good, bad), (bad, good)):
        refused = run("diff", *sides)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.splitlines()[0] == f"{bad}: reward of row 1"
    sizes = run("diff", good, good, "--prompt-group-sizes", "2,2")
    assert sizes.err.splitlines()[0] == f"{good}: prompt_group_sizes"
    # Of two configs on one dump it says which one refuses the rows.
    both = run("diff", GRPO, "miles-2498", "--dump", MAINSTREAM)
    assert both.err.splitlines()[0].startswith("miles-2498: ")


def test_guesses_are_said_of_each_dump_once(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    rows = [{"index": n, "reward": n % 2} for n in range(4)]
    one, other = jsonl(*rows, name="one.jsonl"), jsonl(*rows, name="other.jsonl")
    said = run("diff", one, other).err.splitlines()
    assert [line.partition(": prompt groups were guessed")[0] for line in said] == [
        f"warning: {path}" for path in (one, other)
    ]
    shown = run("diff", GRPO, "rows", "--dump", one)
    assert shown.err.count("prompt groups were guessed") == 1
    [warning] = run("diff", GRPO, "rows", "--dump", one, "--json").json["warnings"]
    assert warning.startswith(f"{one}: prompt groups were guessed")


def test_other_rows_are_refused(run: Callable[..., Run]) -> None:
    lengths = run("diff", EXAMPLE, LORA)
    assert "58 and 25 rows" in lengths.err
    ids = run("diff", EXAMPLE, SLIME)
    assert (ids.code, "other rollout ids on rows 0, 1, 2" in ids.err) == (2, True)


@pytest.mark.parametrize("sides", [(GRPO, DR_GRPO), ("rows", EXAMPLE)], ids=["configs", "baseline"])
def test_a_config_or_baseline_needs_a_dump(run: Callable[..., Run], sides: tuple[object, object]) -> None:
    refused = run("diff", *sides)
    assert (refused.code, refused.out) == (2, "")
    assert "expected: --dump DUMP" in refused.err


def test_settings_hold_for_both_sides(run: Callable[..., Run]) -> None:
    shown = run(
        "diff",
        GRPO,
        DR_GRPO,
        "--dump",
        EXAMPLE,
        "--set",
        "grpo_std_normalization=false",
        "--set",
        "zero_std_tolerance=0",
    )
    assert shown.code == 0
    assert shown.lines[1:] == ["setting advantage_estimator: grpo -> dr_grpo", "no change on 58 rows"]


def test_tolerance(run: Callable[..., Run]) -> None:
    arguments = ("diff", GRPO, DR_GRPO, "--dump", EXAMPLE, "--tolerance")
    assert run(*arguments, 1).code == 0
    # Changes of more than half the larger side, of more than 0.5 below 1: rollouts 23, 10, 2, 13 and 0.
    assert run(*arguments, 0.5).lines[3] == "12 of 58 rows change, of 5 of 24 rollouts in 4 of 6 prompt groups"
    assert run(*arguments, -1).code == 2


def test_a_long_list_is_cut(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(*({"group_index": n // 4, "index": n, "reward": n % 3} for n in range(200)))
    arguments = ("diff", GRPO, DR_GRPO, "--dump", path)
    # In every third group rewards are 1, 2, 0, 1 with mean 1, where two rollouts keep 0: 200 - 2 * 17.
    assert run(*arguments).lines[-1] == "40 of 166 rollouts, the most changed first; --all shows every one"
    assert len(run(*arguments, "--all").lines) == 7 + 166
    assert len(run(*arguments, "--json").json["rollouts"]) == 166


def test_help_has_an_example(run: Callable[..., Run]) -> None:
    assert "Example: miles-norm diff" in run("diff", "--help").out
