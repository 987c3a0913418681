"""``explain``: rows, rollouts and groups, and ids that name none or several."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import EXAMPLE, LORA, MAINSTREAM, Run

from miles_norm import normalize_rewards, read_dump


def test_explain_a_row(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("explain", EXAMPLE, "--row", 12)
    assert shown.out == normalize_rewards(read_dump(EXAMPLE).samples).explain(12) + "\n"
    monkeypatch.setenv("COLUMNS", "60")
    narrow = run("explain", EXAMPLE, "--row", 12)
    assert max(map(len, narrow.lines)) <= 60
    # Continued lines stand under the text, not under its name.
    assert all(line[:14].strip() in ("", "group", "rollout", "reward", "statistics", "arithmetic", "training")
               for line in narrow.lines[1:])  # fmt: skip
    assert narrow.out.split() == shown.out.split()


def test_explain_a_rollout_says_shared_things_once(run: Callable[..., Run]) -> None:
    shown = run("explain", EXAMPLE, "--rollout", 1)
    assert shown.lines[0] == "rollout 1 in prompt group 0"
    assert shown.out.count("  arithmetic  grpo: (0.25 - 0.4375) / ") == 1
    assert [line.split(":")[0] for line in shown.lines if line.startswith("row")] == [
        "row 2",
        "row 3",
        "row 4",
        "row 5",
    ]
    assert shown.out.count("  training ") == 4
    alone = run("explain", EXAMPLE, "--rollout", 3)
    assert alone.out == run("explain", EXAMPLE, "--row", 10).out


def test_explain_a_group(run: Callable[..., Run]) -> None:
    shown = run("explain", EXAMPLE, "--group", 0)
    assert shown.lines[:2] == ["prompt group 0", "11 rows, 4 rollouts, 4 in the statistics: mean 0.4375, std 0.4270"]
    assert [line.split() for line in shown.lines[4:8]] == [
        ["0", "0,", "1", "2", "0", "-1.0247"],
        ["1", "2-5", "4", "0.2500", "-0.4392"],
        ["2", "6-9", "4", "1.0000", "1.3175"],
        ["3", "10", "1", "0.5000", "0.1464"],
    ]
    # Rollout 2 has the largest advantage; of its rows 6 to 9 row 8 has the most trainable tokens, 31.
    assert shown.lines[9].startswith("for example, row 8: advantage 1.31746")


def test_explain_a_group_with_exclusions_and_rows_of_their_own_rewards(run: Callable[..., Run]) -> None:
    excluded = run("explain", MAINSTREAM, "--group", 3, "--set", "untrained_rollouts=exclude")
    assert excluded.lines[5].split(maxsplit=5) == ["13", "26,", "27", "2", "1.0000", "0  excluded: untrained"]
    assert excluded.lines[4].endswith("siblings disagree")
    assert "warning: siblings of rollouts" in excluded.err
    own = run("explain", MAINSTREAM, "--group", 3, "--set", "advantage_estimator=ppo")
    assert own.lines[4].split() == ["12", "24,", "25", "2", "0", "0", "to", "1.0000", "siblings", "disagree"]
    assert own.lines[5].endswith("untrained")


def test_explain_an_empty_group(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl({"reward": 1.0})
    shown = run("explain", path, "--group", 1, "--prompt-group-sizes", "1,0")
    assert shown.out == "prompt group 1\nno rollout, so there is nothing to explain\n"
    assert run("explain", path, "--group", 1, "--prompt-group-sizes", "1,0", "--json").json["rows"] == []


def test_explain_ids_that_several_things_have(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(
        {"group_index": 0, "rollout_id": 7, "reward": 1.0},
        {"group_index": 0, "rollout_id": "7", "reward": 0.0},
        {"group_index": "0", "rollout_id": "8", "reward": 0.0},
    )
    rollouts = run("explain", path, "--rollout", 7)
    assert rollouts.lines[0] == "note: 7 is an id of type int and one of type str"
    assert [line for line in rollouts.lines if line.startswith("row")] == [
        "row 0: advantage 0.7071058",
        "row 1: advantage -0.7071058",
    ]
    groups = run("explain", path, "--group", 0)
    assert groups.lines[0] == "note: 0 is an id of type int and one of type str"
    assert groups.lines.count("prompt group 0") == 2
    # An id is compared as it is written: 07 is not 7.
    assert run("explain", path, "--rollout", "07").code == 2


def test_explain_with_adapters(run: Callable[..., Run]) -> None:
    both = run("explain", LORA, "--rollout", 5)
    assert both.lines[0] == "note: rollout id 5 occurs in 2 prompt groups (1, 3), as 2 rollouts"
    assert sum(line.startswith("rollout 5 in prompt group") for line in both.lines) == 2
    one = run("explain", LORA, "--rollout", "code-lora/5")
    assert "note" not in one.out
    assert one.lines[0] == "rollout 5 in prompt group 3"
    by_id = ("--prompt-group-sizes", "none")
    assert run("explain", LORA, "--group", "code-lora/1", *by_id).lines[0] == "prompt group code-lora/1"
    several = run("explain", LORA, "--group", 1, *by_id)
    assert several.lines[0] == "note: group id 1 is used by several adapters: math-lora/1, code-lora/1"


@pytest.mark.parametrize("selector", [("--row", 3), ("--rollout", 1), ("--group", 0)])
def test_explain_as_json(run: Callable[..., Run], selector: tuple[str, int]) -> None:
    shown = run("explain", EXAMPLE, *selector, "--json").json
    result = normalize_rewards(read_dump(EXAMPLE).samples)
    rows = {"--row": [3], "--rollout": [2, 3, 4, 5], "--group": list(range(11))}[selector[0]]
    assert [row["row"] for row in shown["rows"]] == rows
    assert [row["explanation"] for row in shown["rows"]] == [result.explain(row) for row in rows]
    assert [group["group"] for group in shown["groups"]] == [0]
    assert len(shown["rollouts"]) == (4 if selector[0] == "--group" else 1)
    assert shown["rollouts"][-1]["group"] == 0


@pytest.mark.parametrize(
    ("selectors", "texts"),
    [
        ((), ["got:      none of --row, --rollout, --group", "exactly one"]),
        (("--row", 1, "--group", 0), ["got:      --row and --group", "exactly one"]),
        (("--row", 58), ["--row 58\n", "a dump of 58 rows", "a row number from 0 to 57"]),
        (("--row", -1), ["--row -1\n", "a row number from 0 to 57"]),
        (("--rollout", 99), ["no such rollout id", "rollout ids 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 14 more"]),
        (("--group", "x"), ["no such group id", "group ids 0, 1, 2, 3, 4, 5\n"]),
    ],
)
def test_explain_what_does_not_exist(run: Callable[..., Run], selectors: tuple[object, ...], texts: list[str]) -> None:
    refused = run("explain", EXAMPLE, *selectors)
    assert (refused.code, refused.out) == (2, "")
    assert [text for text in texts if text not in refused.err] == []


def test_explain_a_rollout_where_no_row_has_an_id(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    refused = run("explain", jsonl({"group_index": 0, "reward": 1.0}), "--rollout", 0)
    assert refused.code == 2
    assert "a rollout id, but no row has one" in refused.err
