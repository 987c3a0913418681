"""Audits of many dumps: order, names, what is kept, and how much memory they take."""

import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, MAINSTREAM

from miles_norm import RolloutDump, Sample, write_dump
from miles_norm.audit import audit_dumps, audit_metrics, audit_rows
from miles_norm.audit.run import PAGE_POINTS, PAGE_ROWS
from miles_norm.errors import ConfigError, DumpError, SampleError

Row = dict[str, Any]


def random_rows(seed: int, prompts: int = 4, rollouts: int = 4, tokens: int = 8) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for number in range(prompts * rollouts):
        reward = float(rng.random() < 0.5)
        for _ in range(rng.randint(1, 4)):
            mask = [rng.randint(0, 1) for _ in range(tokens - 1)] + [1]
            row = {"group_index": number // rollouts, "rollout_id": number, "reward": reward, "loss_mask": mask}
            rows.append(row | {"tokens": [rng.randint(0, 9**6) for _ in range(tokens)], "response_length": tokens})
    return rows


@pytest.fixture(name="dump")
def fixture_dump(tmp_path: Path) -> Callable[..., Path]:
    def dump(name: str, rollout_id: int | None, **settings: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write_dump(RolloutDump(random_rows(rollout_id or 0, **settings), rollout_id, {}), path)
        return path

    return dump


def test_steps_stand_in_the_order_of_their_numbers(dump: Callable[..., Path]) -> None:
    """A shell puts rollout_10 before rollout_2."""
    audit = audit_dumps([dump(f"rollout_{n}.pt", n) for n in (1, 10, 2)])
    assert [step.rollout_id for step in audit.steps] == [1, 2, 10]
    assert [step.name for step in audit.steps] == ["rollout_1.pt", "rollout_2.pt", "rollout_10.pt"]


def test_dumps_without_distinct_numbers_keep_their_order(dump: Callable[..., Path]) -> None:
    paths = [dump("b/rollout.pt", 3), dump("a/rollout.pt", 3)]
    audit = audit_dumps(paths)
    # One name in two folders is told apart by the folder.
    assert [step.name for step in audit.steps] == [str(path) for path in paths]
    assert [step.name for step in audit_dumps([paths[0], EXAMPLE]).steps] == [EXAMPLE.name, "rollout.pt"]


def test_findings_by_name_and_step() -> None:
    audit = audit_dumps([MAINSTREAM, EXAMPLE])
    # Both are step 0, so that they stand as given.
    assert {name: [step for step, _ in found] for name, found in audit.findings.items()} == {
        "disagreeing_siblings": [0],
        "changed_advantages": [0, 1],
        "fan_out_weight": [0, 1],
        "zero_variance": [0, 1],
        "untrained_rollouts": [0],
    }


def test_progress_runs_over_all_files(dump: Callable[..., Path], tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in random_rows(0)), encoding="utf-8")
    paths = [dump("a.pt", 1), lines]
    seen: list[tuple[int, int]] = []
    audit_dumps(paths, progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in paths)
    assert {each for _, each in seen} == {total}
    done = [each for each, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == total


@pytest.mark.parametrize(
    ("paths", "error", "text"),
    [([], ConfigError, "there is nothing to audit"), (["nowhere.pt"], DumpError, "nowhere.pt")],
)
def test_what_cannot_be_audited(paths: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        audit_dumps(paths)
    with pytest.raises(ConfigError, match="no such baseline"):
        audit_dumps([EXAMPLE], baseline="best")


def living_rows() -> int:
    gc.collect()
    return sum(type(each) is dict and {"loss_mask", "tokens"} <= each.keys() for each in gc.get_objects())


def test_memory_holds_one_dump(dump: Callable[..., Path]) -> None:
    """When a dump is opened, no row of those before it is left."""
    paths = [dump(f"rollout_{n}.pt", n) for n in range(4)]
    sizes = [path.stat().st_size for path in paths]
    starts = [sum(sizes[:n]) for n in range(4)]
    before = living_rows()
    left, most = {}, 0

    def count(done: int, total: int) -> None:
        nonlocal most
        # The end of a dump is where the next one begins: what is kept is the count of the last call there.
        left[done] = living_rows() - before
        most = max(most, left[done])

    audit_dumps(paths, progress=count)
    assert [left[start] for start in starts] == [0] * 4
    assert most > 16  # the rows of a dump that is read are counted


def test_what_a_page_shows_is_bounded() -> None:
    rows = random_rows(0, prompts=60, rollouts=8, tokens=1)
    step = audit_rows(rows, share=0.05)
    shown = sum(len(member["rows"]) for group in step.groups for member in group["members"])
    assert 0.8 * 0.05 * PAGE_ROWS < shown <= 0.05 * PAGE_ROWS < len(rows)
    assert all(group["more_rollouts"] == 0 for group in step.groups)
    assert [group["id"] for group in step.groups] == sorted((group["id"] for group in step.groups), key=int)
    assert {len(column) for column in step.points.values()} == {int(PAGE_POINTS * 0.05)}
    assert len(set(step.points["rollout"])) == int(PAGE_POINTS * 0.05)


def test_the_most_notable_groups_are_shown_first() -> None:
    rows = random_rows(1, prompts=60)
    for row in rows:
        if row["group_index"] == 37:
            row["reward"] = random.Random(row["rollout_id"]).random()  # equal within rollouts
        if row["group_index"] == 51:
            row["remove_sample"] = row["rollout_id"] % 2 == 0
    ids = [group["id"] for group in audit_rows(rows, share=0.005).groups]
    assert "51" in ids  # a note about untrained rows


def test_one_group_larger_than_the_page_is_cut() -> None:
    rows = [dict(row, group_index=0) for row in random_rows(2, prompts=40)]
    [group] = audit_rows(rows, share=24 / PAGE_ROWS).groups
    shown = sum(len(member["rows"]) for member in group["members"])
    assert 20 < shown <= 24
    assert group["more_rollouts"] == 160 - len(group["members"])


def test_a_rollout_of_many_rows_is_cut() -> None:
    rows = [
        {"group_index": 0, "rollout_id": int(n > 200), "reward": float(n > 200), "response_length": 1}
        for n in range(260)
    ]
    [group] = audit_rows(rows).groups
    assert [(len(member["rows"]), member["more_rows"]) for member in group["members"]] == [(48, 153), (48, 11)]


def test_an_empty_group_is_not_shown() -> None:
    rows = random_rows(0, prompts=1)
    step = audit_rows(rows, prompt_group_sizes=[0, len(rows), 0])
    assert [group["id"] for group in step.groups] == ["1"]
    assert step.group_source == "prompt_group_sizes"


def test_one_path_is_one_dump(dump: Callable[..., Path]) -> None:
    path = dump("rollout_0.pt", 0)
    assert [step.name for step in audit_dumps(str(path)).steps] == [step.name for step in audit_dumps([path]).steps]


def test_what_is_no_dict_and_no_setting_is_refused() -> None:
    good = {"group_index": 0, "index": 0, "reward": 1.0, "response_length": 1}
    with pytest.raises(SampleError, match=r"row 1\n.*type Sample\n(.|\n)*sample\.to_dict\(\)"):
        audit_rows([good, Sample(index=1)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a NormalizationConfig"):
        audit_rows([good], {"std_ddof": 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"baseline \['rows'\]\n"):
        audit_rows([good], baseline=["rows"])  # type: ignore[arg-type]
    with pytest.raises(SampleError, match=r"result\n.*type dict\n.*NormalizedRewards"):
        audit_metrics({})  # type: ignore[arg-type]
