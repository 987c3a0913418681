"""``miles-norm audit``: first what is wrong and what to change, then figures; a report; JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, LORA, MAINSTREAM, SLIME, Run, many_groups

from miles_norm import RolloutDump, read_dump, write_dump


def test_the_first_lines_say_what_is_wrong_and_what_to_change(run: Callable[..., Run]) -> None:
    shown = run("audit", MAINSTREAM)
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[0].startswith(
        "disagreeing siblings: Siblings of rollouts 1, 4, 12, 15, 20, 23 have different rewards"
    )
    assert shown.lines[1].startswith("  to change: give every row the reward of its rollout")
    names = ("disagreeing siblings", "changed advantages", "fan out weight", "zero variance", "untrained rollouts")
    assert [line.split(":")[0] for line in shown.lines if line.startswith(names)] == list(names)
    assert "7 of 51 trained rows are pushed the other way" in shown.out


def test_figures_by_hand(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    """Group 0: a success of one row, a failure of three; rows of five tokens."""
    path = jsonl(
        *({"group_index": 0, "rollout_id": f"r{r}", "reward": 1.0 - r} for r, n in ((0, 1), (1, 3)) for _ in range(n))
    )
    shown = run("audit", path)
    assert shown.lines[-7:] == [
        "rows.jsonl: 4 rows, 2 rollouts, 1 prompt group; baseline rows: each row counts as a rollout",
        "reward mean  0.5000 per rollout, 0.2500 per row",
        "fan-out      mean 2.0000, max 3, 50% of rollouts have one row",
        "no signal    0% of groups: 0% all right, 0% all wrong",
        "effective    2 of 2 rollouts in 1 group have an advantage and tokens",
        "baseline     0 of 4 rows with the other sign, a mean change of 0.3536",
        "weights      0.5000 to 1.5000 times an equal share in a mean over rows, 0.5000 to 1.5000 over tokens",
    ]


def test_nothing_to_find(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(*({"group_index": 0, "rollout_id": r, "reward": r % 2} for r in range(4)))
    assert run("audit", path).lines[0] == "nothing was found that needs a change"


def test_several_dumps_make_a_table(run: Callable[..., Run], tmp_path: Path) -> None:
    paths = []
    for number in (10, 2):
        paths.append(tmp_path / f"rollout_{number}.pt")
        write_dump(RolloutDump(read_dump(EXAMPLE).samples, number, {}), paths[-1])
    shown = run("audit", *paths, "--baseline", "verl")
    assert shown.lines[0].startswith("changed advantages: in 2 of 2 dumps; rollout_2.pt: With the baseline verl")
    assert "2 dumps, 116 rows, 48 rollouts, 12 prompt groups; baseline verl: each row is an observation" in shown.out
    assert [line.split() for line in shown.lines[-2:]] == [
        ["rollout_2.pt", "58", "24", "0.4375", "0.4440", "33%", "0", "2.0690"],
        ["rollout_10.pt", "58", "24", "0.4375", "0.4440", "33%", "0", "2.0690"],
    ]


def test_a_long_run_shows_a_part_of_its_steps(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    rows = [{"group_index": 0, "rollout_id": r, "reward": r % 2} for r in range(4)]
    paths = [jsonl(*rows, name=f"step_{number:03d}.jsonl") for number in range(60)]
    shown = run("audit", *paths)
    steps = [line.split()[0] for line in shown.lines if line.startswith("step_")]
    assert (len(steps), steps[0], steps[-1]) == (40, "step_000.jsonl", "step_059.jsonl")
    assert shown.lines[-1] == "40 of 60 dumps; the report and --json have all"
    assert len(run("audit", *paths, "--json").json["steps"]) == 60


@pytest.mark.parametrize("path", [EXAMPLE, MAINSTREAM, LORA, SLIME], ids=lambda path: path.stem)
def test_json(run: Callable[..., Run], path: Path) -> None:
    found = run("audit", path, "--json").json
    assert found["baseline"] == "rows"
    assert [step["dump"] for step in found["steps"]] == [path.name]
    assert found["steps"][0]["metrics"]["miles_norm/rows"] in (25, 58)
    assert found["findings"]
    assert all(finding["problem"] and finding["remedy"] for finding in found["findings"])
    assert found["config"]["advantage_estimator"] == "grpo"


def test_faults_in_a_dump_do_not_stop_an_audit(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    """What normalize refuses is a finding here."""
    rows: list[dict[str, Any]] = [{"group_index": 0, "rollout_id": r, "reward": r % 2} for r in range(3)]
    path = jsonl(*rows, {"group_index": 0, "rollout_id": 3, "reward": None})
    assert run("normalize", path).code == 2
    found = run("audit", path, "--prompt-group-sizes", "1,2", "--json").json
    assert {finding["name"]: finding["rows"] for finding in found["findings"]}["unscored_rewards"] == [3]
    assert found["findings"][0]["name"] == "stale_sizes"
    ignored = run("audit", path, "--prompt-group-sizes", "none", "--json").json
    assert "stale_sizes" not in [finding["name"] for finding in ignored["findings"]]


def test_report(run: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    written = run("audit", EXAMPLE, "-o", path)
    assert written.code == 0
    assert written.err == f"wrote {path}: open it in a browser\n"
    assert "changed advantages" in written.out
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    refused = run("audit", EXAMPLE, "-o", path)
    assert (refused.code, refused.out) == (2, "")
    assert "a file that exists" in refused.err
    assert run("audit", EXAMPLE, "-o", path, "--force", "--json").json["steps"]
    assert path.read_text(encoding="utf-8") == page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((EXAMPLE, "-o", "report.pdf"), "a name that ends in .html"),
        ((EXAMPLE, "-o", "nowhere/report.html"), "no folder nowhere"),
        ((EXAMPLE, "--baseline", "best"), "one of rows, miles-2369, miles-2498, slime, agent-lightning, verl"),
        ((EXAMPLE, "--baseline", "slime"), "n_samples_per_prompt=None"),
        ((EXAMPLE, "nowhere.pt"), "nowhere.pt"),
        ((), "missing argument 'DUMP"),
        ((EXAMPLE, "--prompt-group-sizes", "a"), "whole numbers separated by commas"),
    ],
    ids=str,
)
def test_what_cannot_be_audited(run: Callable[..., Run], arguments: tuple[object, ...], text: str) -> None:
    refused = run("audit", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert text in refused.err


def test_a_baseline_with_its_settings(run: Callable[..., Run]) -> None:
    layout = ("--set", "n_samples_per_prompt=4", "--set", "rollout_batch_size=6")
    found = run("audit", SLIME, "--baseline", "slime", *layout, "--json").json
    assert found["steps"][0]["metrics"]["miles_norm/vs_slime/mean_abs_change"] > 0


def test_ids_of_a_dump_cannot_write_to_the_terminal(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    rows = [{"group_index": "\x1b[2J", "rollout_id": f"\x1b[31m{r}", "reward": r == 0} for r in (0, 1, 1, 1)]
    shown = run("audit", jsonl(*rows))
    assert "\\x1b[31m1" in shown.out
    assert "\x1b" not in shown.out


def test_warnings_about_files_go_to_stderr(run: Callable[..., Run], tmp_path: Path) -> None:
    import torch

    path = tmp_path / "dump.pt"
    torch.save({"samples": many_groups(2), "other": 1}, path)
    rows = [dict(row, response_length=1) for row in many_groups(2)]
    torch.save({"samples": rows, "other": 1}, path)
    shown = run("audit", path)
    assert "the keys 'other' are not read" in shown.err
    assert "the keys" not in shown.out
    assert json.loads(run("audit", path, "--json").out)["warnings"]


def test_help_has_an_example(run: Callable[..., Run]) -> None:
    assert "Example: miles-norm audit" in run("audit", "--help").out
