"""The page of an audit: its data, and that it is one file. What it shows is tested in ``tests/browser``."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, MAINSTREAM

from miles_norm import NormalizationConfig, read_dump
from miles_norm.audit import audit_dumps, write_report
from miles_norm.audit.report import page_data, report_page
from miles_norm.errors import DumpError

HOSTILE = '</script><img src=x onerror="alert(1)">'


def data_of(page: str) -> Any:
    return json.loads(re.findall(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[0])


def test_one_file_with_all_that_was_found(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    audit = audit_dumps([EXAMPLE, MAINSTREAM], NormalizationConfig(std_ddof=0))
    write_report(audit, path)
    page = path.read_text(encoding="utf-8")
    assert sorted(tmp_path.iterdir()) == [path]
    data = data_of(page)
    assert data == json.loads(json.dumps(page_data(audit)))
    assert [step["name"] for step in data["steps"]] == [EXAMPLE.name, MAINSTREAM.name]
    assert data["settings"] == ["std_ddof=0"]
    assert data["metrics"]["rows"] == [58, 58]
    assert {len(values) for values in data["metrics"].values()} == {2}
    assert data["findings"][0]["name"] == "disagreeing_siblings"
    assert [place["step"] for place in data["findings"][1]["places"]] == [0, 1]
    assert len(data["groups"]) == 12
    assert {group["step"] for group in data["groups"]} == {0, 1}
    assert {len(column) for column in data["points"].values()} == {48}
    assert data["sample"] == {"groups": 12, "rollouts": 48}


def test_rows_of_a_rollout_and_its_tree() -> None:
    """Rollout 1: two branches of one conversation, a compacted one, a sub-agent; row 3 has the most tokens."""
    [group] = [group for group in page_data(audit_dumps([EXAMPLE]))["groups"] if group["id"] == "0"]
    [member] = [member for member in group["members"] if member["id"] == "1"]
    assert [row["row"] for row in member["rows"]] == [2, 3, 4, 5]
    assert [row["speaks"] for row in member["rows"]] == [False, True, False, False]
    assert [row["trainable"] for row in member["rows"]] == [12, 31, 24, 3]
    assert [row["response"] for row in member["rows"]] == [120, 116, 54, 3]
    # 24 rollouts; 70 trainable tokens in this one.
    assert [row["weight"] for row in member["rows"]] == pytest.approx([1 / 24 / 70] * 4, rel=1e-4)
    paths = [row["metadata"]["leaf"]["path_node_ids"] for row in read_dump(EXAMPLE).samples[2:6]]
    assert paths[:2] == [[0, 2, 4, 6], [0, 2, 3, 5]]
    parents = {node["id"]: node["parent"] for node in member["tree"]["nodes"]}
    assert parents == {
        str(node): None if parent is None else str(parent)
        for path in paths
        for parent, node in zip([None, *path], path, strict=False)
    }
    assert [leaf["node_id"] for leaf in member["tree"]["leaves"]] == [str(path[-1]) for path in paths]
    assert [leaf["row"] for leaf in member["tree"]["leaves"]] == [0, 1, 2, 3]
    assert dict(member["explanation"])["arithmetic"].startswith("grpo: (0.25 - 0.4375) / ")
    assert member["rows"][1]["explanation"] == [["training", "31 trainable tokens carry it"]]


def test_rows_of_the_group_and_what_the_baseline_changes() -> None:
    groups = {group["id"]: group for group in page_data(audit_dumps([MAINSTREAM]))["groups"]}
    assert {key: group["flips"] for key, group in groups.items()} == {"0": 2, "1": 0, "2": 0, "3": 1, "4": 0, "5": 4}
    assert groups["0"]["fan_out"] == (1, 4)
    assert groups["0"]["mean"] == 0.375
    own = [row["reward"] for row in read_dump(MAINSTREAM).samples[:11]]
    assert groups["0"]["row_mean"] == pytest.approx(sum(own) / 11, rel=1e-4)
    turned = [
        row["row"] for group in groups.values() for member in group["members"] for row in member["rows"] if row["flips"]
    ]
    assert turned == [2, 10, 25, 42, 44, 45, 46]


def hostile_dump(path: Path) -> Path:
    row = {
        "adapter": HOSTILE,
        "response_length": 1,
        "status": HOSTILE,
        "metadata": {"leaf": {"path_node_ids": [HOSTILE]}},
    }
    rows = [
        {
            **row,
            "group_index": f"{HOSTILE}{number % 2}",
            "rollout_id": f"{HOSTILE}{number}",
            "reward": float(number > 1),
        }
        for number in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_hostile_ids_stay_in_the_data(tmp_path: Path) -> None:
    page = report_page(audit_dumps([hostile_dump(tmp_path / "a<b>.jsonl")]))
    assert "<img" not in page
    assert len(re.findall(r"<\s*/\s*script", page, flags=re.IGNORECASE)) == 2
    data = data_of(page)
    assert data["groups"][0]["id"] == f"{HOSTILE}/{HOSTILE}0"
    assert data["groups"][0]["members"][0]["rows"][0]["state"] == [HOSTILE.lower()]
    assert data["groups"][0]["members"][0]["tree"]["nodes"] == [{"id": HOSTILE, "parent": None}]
    assert "<title>Rollout audit of a&lt;b&gt;.jsonl</title>" in page


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    path.write_text('{"reward": 1.0, "response_length": 1}\n', encoding="utf-8")
    write_report(audit_dumps([path]), tmp_path / "report.html")
    assert "of \\udcff.jsonl</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_rewards_that_pass_through_are_named(estimator: str) -> None:
    data = page_data(audit_dumps([EXAMPLE], NormalizationConfig(advantage_estimator=estimator)))
    assert data["estimator"] == f"{estimator}, rows keep their own rewards"


def test_a_baseline_that_refuses_leaves_the_comparison_out() -> None:
    data = page_data(audit_dumps([MAINSTREAM, EXAMPLE], baseline="miles-2498"))
    assert data["metrics"]["vs_miles-2498/sign_flips"] == [None, 0]
    assert data["points"]["baseline"][:24] == [None] * 24
    assert None not in data["points"]["baseline"][24:]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"report .*nowhere"):
        write_report(audit_dumps([EXAMPLE]), tmp_path / "nowhere" / "report.html")
