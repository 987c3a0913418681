"""What programs read: JSON on stdout, and dumps with the advantages of their rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import EXAMPLE, LORA, MAINSTREAM, Run

from miles_norm import normalize_rewards, read_dump
from miles_norm.cli import report


def test_json_is_one_strict_object(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(
        {"group_index": "a", "rollout_id": 7, "reward": 1.0},
        {"group_index": "a", "rollout_id": "7", "reward": float("inf")},
        {"group_index": "a", "reward": 0.0},
    )
    shown = run("normalize", path, "--json", "--set", "missing_reward=exclude", "--set", "advantage_estimator=dr_grpo")
    assert shown.err == ""
    assert shown.json.keys() == {"config", "group_source", "groups", "metrics", "warnings", "rows"}
    assert shown.json["config"]["missing_reward"] == "exclude"
    assert shown.json["config"]["std_ddof"] == 1
    assert shown.json["group_source"] == "group_index"
    assert shown.json["groups"] == [
        {
            "group": "a",
            "rows": 3,
            "rollouts": 3,
            "counted_rollouts": 2,
            "fan_out_min": 1,
            "fan_out_max": 1,
            "reward_mean": 0.5,
            "reward_std": 0.5**0.5,
            "advantage_min": -0.5,
            "advantage_max": 0.5,
            "notes": ["1 excluded: unscored"],
        }
    ]
    assert shown.json["metrics"]["miles_norm/excluded_unscored"] == 1
    names = ("row", "group", "rollout", "advantage", "trained", "reward", "rollout_reward")
    assert [tuple(row) for row in shown.json["rows"]] == [names] * 3
    assert [tuple(row.values()) for row in shown.json["rows"]] == [
        (0, "a", 7, 0.5, True, 1.0, 1.0),
        (1, "a", "7", 0.0, False, None, None),
        (2, "a", None, -0.5, True, 0.0, 0.0),
    ]


def test_json_of_a_real_dump_holds_the_result(run: Callable[..., Run]) -> None:
    shown = run("normalize", MAINSTREAM, "--json").json
    result = normalize_rewards(read_dump(MAINSTREAM).samples)
    assert [row["advantage"] for row in shown["rows"]] == result.advantages.tolist()
    assert [row["trained"] for row in shown["rows"]] == result.trained_rows.tolist()
    assert shown["warnings"] == list(result.warnings)
    assert shown["metrics"] == result.metrics()
    assert [group["group"] for group in shown["groups"]] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("suffix", [".pt", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_output_is_the_dump_with_three_keys_more(run: Callable[..., Run], tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    shown = run("normalize", EXAMPLE, "-o", out)
    assert shown.code == 0
    assert shown.err == f"wrote {out}: 58 rows, each with advantage, trained, rollout_reward\n"
    given, written = read_dump(EXAMPLE), read_dump(out)
    result = normalize_rewards(given.samples)
    added = [(row.pop("advantage"), row.pop("trained"), row.pop("rollout_reward")) for row in written.samples]
    rewards = result.rollout_rewards[result.index.row_rollout].tolist()
    assert added == list(zip(result.advantages.tolist(), [True] * 58, rewards, strict=True))
    assert written.samples == given.samples
    assert written.rollout_id == (0 if suffix == ".pt" else None)


def test_output_keeps_metadata_in_pt_and_says_what_jsonl_cannot_hold(run: Callable[..., Run], tmp_path: Path) -> None:
    assert run("normalize", LORA, "-o", tmp_path / "out.pt").code == 0
    assert read_dump(tmp_path / "out.pt").metadata == read_dump(LORA).metadata
    shown = run("normalize", LORA, "-o", tmp_path / "out.jsonl", "--json")
    assert len(shown.json["rows"]) == 25
    assert "warning: " in shown.err
    assert "prompt_group_sizes" in shown.err


def test_output_has_no_reward_for_an_unscored_rollout(
    run: Callable[..., Run], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    path = jsonl({"group_index": 0, "index": 0, "reward": None}, {"group_index": 0, "index": 1, "reward": 1})
    out = tmp_path / "out.jsonl"
    assert run("normalize", path, "-o", out, "--set", "missing_reward=exclude").code == 0
    added = [(row["advantage"], row["trained"], row["rollout_reward"]) for row in read_dump(out).samples]
    assert added == [(0.0, False, None), (0.0, True, 1.0)]


def test_output_replaces_nothing_without_force(
    run: Callable[..., Run], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    path = jsonl({"group_index": 0, "index": 0, "reward": 1.0})
    before = path.read_bytes()
    over_input = run("normalize", path, "-o", tmp_path / "." / path.name)
    assert (over_input.code, over_input.out) == (2, "")
    assert "  got:      the input file\n" in over_input.err
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine", encoding="utf-8")
    over_other = run("normalize", path, "-o", taken)
    assert (over_other.code, taken.read_text(encoding="utf-8")) == (2, "mine")
    assert "  got:      a file that exists\n" in over_other.err
    assert "pass --force to replace this one" in over_other.err
    assert run("normalize", path, "-o", taken, "--force").code == 0
    assert path.read_bytes() == before
    again = run("normalize", taken, "-o", tmp_path / "again.jsonl")
    assert again.code == 2
    assert "  got:      row 0 with one of the keys\n" in again.err
    assert not (tmp_path / "again.jsonl").exists()
    assert run("normalize", taken, "-o", tmp_path / "again.jsonl", "--force").code == 0


NAME = "name the output with one of these endings"


@pytest.mark.parametrize(
    ("command", "out", "texts"),
    [
        ("normalize", "out.csv", ["a name that ends in .pt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .saf", NAME]),
        ("normalize", "out.json", ["the file name 'out.json'", NAME]),
        ("normalize", "no/such/out.jsonl", ["no folder ", "no/such", "make the folder"]),
        ("convert", "out.jsonl", ["a name that ends in .safetensors or .parquet", NAME]),
        ("convert", "no/such/out.parquet", ["no folder ", "make the folder"]),
    ],
)
def test_output_that_cannot_be_written(
    run: Callable[..., Run], tmp_path: Path, command: str, out: str, texts: list[str]
) -> None:
    # Refused before anything is read: the dump does not exist either.
    missing = tmp_path / "missing.jsonl"
    refused = run(command, missing, *(["-o"] if command == "normalize" else []), tmp_path / out)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"output {tmp_path / out}\n")
    assert [text for text in texts if text not in refused.err] == []


def test_a_dump_of_another_kind_is_no_output(run: Callable[..., Run]) -> None:
    assert "  remedy:   give the file the ending of what it holds, or conv" in run("normalize", "rows.json").err


def test_nothing_is_written_where_the_report_fails(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the report")

    for name, arguments in (("print_report", ()), ("report_json", ("--json",))):
        monkeypatch.setattr(report, name, fail)
        with pytest.raises(RuntimeError, match="the report"):
            run("normalize", EXAMPLE, "-o", tmp_path / "out.jsonl", *arguments)
        assert list(tmp_path.iterdir()) == []


def test_the_report_is_the_same_with_an_output(run: Callable[..., Run], tmp_path: Path) -> None:
    for arguments in ((), ("--json",)):
        shown = run("normalize", EXAMPLE, *arguments).out
        assert run("normalize", EXAMPLE, *arguments, "-o", tmp_path / "out.jsonl", "--force").out == shown
