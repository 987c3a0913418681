"""How rows become rollouts and rollouts prompt groups: the cascade, its warnings and errors, and every kind of id."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from batches import new_row

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns, normalize_rewards
from miles_norm.errors import GroupingError, SampleError
from miles_norm.result import NormalizedRewards
from miles_norm.samples import AdapterRef


def rows_of(*ids: Any, **same: Any) -> list[dict[str, Any]]:
    """One row per (group_index, rollout_id)."""
    return [new_row(group_index=group, rollout_id=rollout, **same) for group, rollout in ids]


def grouped(rows: list[Any], sizes: Any = None, **settings: Any) -> NormalizedRewards:
    return normalize_rewards(rows, NormalizationConfig(**settings), prompt_group_sizes=sizes)


FIXED = {"n_samples_per_prompt": 2, "rollout_batch_size": 2}
FOUR = rows_of((0, 0), (1, 1), (0, 2), (1, 3))
FOUR_WITHOUT = rows_of((None, 0), (None, 1), (None, 2), (None, 3))


@pytest.mark.parametrize(
    ("rows", "sizes", "settings", "source", "groups"),
    [
        (FOUR, [3, 1], FIXED, "prompt_group_sizes", [[0, 1, 2], [3]]),
        ([FOUR[:1], FOUR[1:]], [2, 2], FIXED, "prompt_group_sizes", [[0, 1], [2, 3]]),
        ([FOUR[:1], FOUR[1:]], None, FIXED, "nesting", [[0], [1, 2, 3]]),
        (FOUR, None, FIXED, "group_index", [[0, 2], [1, 3]]),
        (FOUR_WITHOUT, None, FIXED, "fixed_fan_out", [[0, 1], [2, 3]]),
        ([*FOUR_WITHOUT, new_row(group_index=None)], None, FIXED, "single_group", [[0, 1, 2, 3, 4]]),
        (FOUR_WITHOUT, None, {}, "single_group", [[0, 1, 2, 3]]),
        (FOUR_WITHOUT, None, {"n_samples_per_prompt": 4}, "single_group", [[0, 1, 2, 3]]),
    ],
)
def test_cascade(rows: list[Any], sizes: Any, settings: dict[str, Any], source: str, groups: list[list[int]]) -> None:
    result = grouped(rows, sizes, **settings)
    assert result.index.group_source == source
    assert result.groups == groups


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array, lambda sizes: [np.int64(n) for n in sizes]])
def test_sizes_of_any_kind_and_empty_groups(kind: Any) -> None:
    result = grouped(FOUR_WITHOUT, kind([0, 1, 0, 3, 0]), n_samples_per_prompt=3)
    assert result.groups == [[], [0], [], [1, 2, 3], []]
    assert result.index.num_groups == 5
    assert result.index.group_ids == [0, 1, 2, 3, 4]
    assert result.incomplete_groups == [0, 1, 2, 4]
    assert result.advantages.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([2, 3], r"got: +2 sizes that sum to 5\n +expected: a sum of 4, the number of rows"),
        ([], r"got: +0 sizes that sum to 0"),
        ([5, -1], r"got: +-1 at position 1\n +expected: non-negative counts"),
        ([2.0, 2], r"got: +2.0 at position 0"),
        ([True, 3], r"got: +True at position 0"),
        (["2", 2], r"got: +'2' at position 0"),
        ([None, 4], r"got: +None at position 0"),
        (torch.tensor([2.0, 2.0]), r"got: +2.0 at position 0, 2.0 at position 1"),
        (torch.tensor([[2, 2]]), r"got: +\[2, 2\] at position 0"),
    ],
)
def test_bad_sizes(sizes: Any, text: str) -> None:
    with pytest.raises(GroupingError, match=text):
        grouped(FOUR, sizes)


def test_nesting() -> None:
    """An inner list is a group; in it ids decide rollouts, or lists do, also where only some rollouts are lists."""
    a, b = new_row(group_index=None, index=1), new_row(group_index=None, index=1)
    result = normalize_rewards([[a, b, a], [], (b,), [[a, b], a, [b], a]])
    assert result.index.group_source == "nesting"
    assert result.groups == [[0, 1, 2], [], [3], [4, 5, 6, 7, 8]]
    # The two rows outside a list share the id 1; each list is a rollout whatever its rows' ids.
    assert result.index.row_rollout.tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 3]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([[new_row()], new_row(), new_row()], r"samples: items 1, 2\n +got: +single rows beside lists of rows"),
        ([], r"reward\n +got: +no rows"),
        ([[], []], r"reward\n +got: +no rows"),
        ([new_row(), 3], r"samples: row 1\n +got: +int"),
        ([[[new_row(), [new_row()]]]], r"samples: row 1\n +got: +list"),
        ("rows", r"samples\n +got: +str"),
        (new_row(), r"samples\n +got: +dict"),
        (None, r"samples\n +got: +NoneType"),
        ([None, "x"], r"samples: rows 0, 1\n +got: +NoneType, str"),
    ],
)
def test_what_is_no_batch(samples: Any, text: str) -> None:
    with pytest.raises(SampleError, match=text):
        normalize_rewards(samples)


def test_a_generator_is_a_batch() -> None:
    assert normalize_rewards(row for row in FOUR).groups == [[0, 2], [1, 3]]


def test_some_rows_without_a_group_count_as_all() -> None:
    rows = rows_of((0, 0), (None, 1), (0, 2), (math.nan, 3))
    guess = grouped(rows)
    assert guess.groups == [[0, 1, 2, 3]]
    [warning] = guess.warnings
    assert warning == (
        "prompt groups were guessed: 'group_index' is missing on rows 1, 3, so all 4 rows form one group and share one "
        "baseline; set group_index on every row when it is sampled, or pass prompt_group_sizes"
    )
    with pytest.raises(
        GroupingError, match=r"'group_index' is missing on rows 1, 3; n_samples_per_prompt and"
    ) as raised:
        grouped(rows, group_fallback="error")
    assert raised.value.rows == (1, 3)


def test_a_mistyped_key_is_suspected_first() -> None:
    with pytest.raises(GroupingError, match=r"remedy: +check group_key='promt': it names a field of the rows or of"):
        grouped(FOUR, group_fallback="error", group_key="promt")
    assert "check group_key='promt'" in grouped(FOUR, group_key="promt").warnings[0]


def test_sizes_that_contradict_the_nesting() -> None:
    nested = [[new_row(index=0), new_row(index=1), new_row(index=2)], [new_row(index=3), new_row(index=4)]]
    for row in (row for group in nested for row in group):
        row["group_index"] = None
    text = "the sizes may be stale: the input is nested into other groups, and the sizes win"
    assert text in normalize_rewards(nested, prompt_group_sizes=[2, 3]).warnings
    assert text not in normalize_rewards(nested, prompt_group_sizes=[3, 2]).warnings


def test_fallback_error() -> None:
    text = r"got: +4 rows; no row has 'group_index'; n_samples_per_prompt \* rollout_batch_size is 3 \* 2 = 6\n"
    with pytest.raises(GroupingError, match=text):
        grouped(FOUR_WITHOUT, group_fallback="error", n_samples_per_prompt=3, rollout_batch_size=2)
    with pytest.raises(GroupingError, match=r"2 \* 2 = 4"):
        grouped(FOUR_WITHOUT, group_fallback="error", **FIXED)
    assert grouped(FOUR, group_fallback="error").warnings == ()
    assert grouped(FOUR_WITHOUT, [2, 2], group_fallback="error").warnings == ()


def test_fixed_fan_out_without_contradiction() -> None:
    result = grouped(FOUR_WITHOUT, **FIXED)
    [warning] = result.warnings
    assert warning == (
        "prompt groups were guessed: no row has 'group_index', and 4 rows are 2 groups of 2 contiguous rows; "
        "set group_index on every row when it is sampled, or pass prompt_group_sizes"
    )


def test_fixed_fan_out_against_the_rollout_ids() -> None:
    """Two rows of rollout 0 fill what would be a group, and rollout 2 is cut by a border."""
    rows = rows_of(*((None, rollout) for rollout in (0, 0, 1, 2, 2, 3)))
    result = grouped(rows, n_samples_per_prompt=2, rollout_batch_size=3)
    assert result.groups == [[0, 1], [2, 3], [4, 5]]
    guess, reused, counts = result.warnings
    assert guess.startswith("prompt groups were guessed")
    assert reused == (
        "the guessed groups contradict the rollout ids: an id in several prompt groups counts as different rollouts: "
        "rollout id 2"
    )
    assert counts.startswith(
        "the guessed groups contradict the rollout ids: 1 of 3 groups hold another number of rollouts"
    )


def test_one_group_against_the_number_of_rollouts() -> None:
    result = grouped(rows_of(*((None, rollout) for rollout in range(5))), n_samples_per_prompt=2)
    assert len(result.warnings) == 2
    assert result.warnings[1].startswith("the guessed groups contradict the rollout ids: 1 of 1 groups")
    assert len(grouped(rows_of(*((None, rollout) for rollout in (0, 0, 1))), n_samples_per_prompt=2).warnings) == 1


def test_padding_takes_no_part_in_the_fixed_fan_out() -> None:
    """Neither in the count of rows, nor as a rollout that contradicts it."""
    padding = new_row(group_index=None, is_padding=True)
    result = grouped([padding, *FOUR_WITHOUT[:2], padding, *FOUR_WITHOUT[2:], padding], **FIXED)
    assert result.index.group_source == "fixed_fan_out"
    assert result.groups == [[0, 1, 2, 3], [4, 5, 6]]
    assert len(result.warnings) == 1


def test_padding_needs_no_group() -> None:
    result = grouped([*FOUR, new_row(group_index=None, is_padding=True), new_row(group_index=None, is_padding=True)])
    assert result.groups == [[0, 2], [1, 3], [4, 5]]
    assert result.index.group_ids == [0, 1, None]
    assert result.warnings == ()


def test_stale_sizes() -> None:
    result = grouped(rows_of((0, 0), (0, 1), (1, 2), (1, 3), (1, 4)), [3, 2])
    assert result.warnings == (
        "the sizes may be stale: rows with different group_index are in one group by prompt_group_sizes, in group 0",
    )
    assert grouped(rows_of((0, 0), (0, 1), (1, 2)), [2, 0, 1]).warnings == ()


def test_an_id_in_two_groups_is_two_rollouts() -> None:
    result = grouped(rows_of((0, 7), (1, 7), (0, 7), (1, 8)))
    assert result.index.row_rollout.tolist() == [0, 1, 0, 2]
    assert result.index.rollout_ids == [7, 7, 8]
    assert result.warnings == (
        "an id in several prompt groups counts as different rollouts: rollout id 7",
    )  # fmt: skip


def test_first_id_that_is_not_none() -> None:
    """rollout_id, else index, else the row itself; 0 is an id, and NaN is none."""
    rows = [
        new_row(rollout_id=0, index=5),
        new_row(rollout_id=math.nan, index=0),
        new_row(rollout_id=None, index=3),
        new_row(rollout_id=None, index=None),
        new_row(rollout_id=np.float64("nan"), index=math.nan),
        new_row(rollout_id=0, index=None),
    ]
    result = grouped(rows)
    assert result.index.row_rollout.tolist() == [0, 0, 1, 2, 3, 0]
    assert result.index.rollout_ids == [0, 3, None, None]


def test_identity_collision() -> None:
    """Row 2 borrows its index 1 as an id, which is the rollout_id of rows 0 and 1, whose own index is 9."""
    rows = [new_row(rollout_id=1, index=9), new_row(rollout_id=1, index=9), new_row(index=1), new_row(index=2)]
    result = grouped(rows)
    assert result.index.row_rollout.tolist() == [0, 0, 0, 1]
    [warning] = result.warnings
    assert warning == (
        "rows 0, 1 with a rollout_id and row 2 without one count as one rollout where that rollout_id equals the "
        "other's index, although their own indices differ"
    )
    # In another group it is another rollout, and nothing is wrong with a rollout_id that equals the row's own index.
    apart = [*rows[:2], new_row(index=1, group_index=1)]
    assert not any("count as one rollout" in text for text in grouped(apart).warnings)
    assert grouped([new_row(rollout_id=1, index=1), new_row(index=1)]).warnings == ()


@pytest.mark.parametrize("name", [str, lambda name: {"name": name, "slot": 0}, lambda name: AdapterRef(name, 0)])
def test_adapters(name: Any) -> None:
    rows = [new_row(group_index=group, index=k, adapter=name(lora)) for k, (group, lora) in
            enumerate([(0, "x"), (0, "y"), (1, "x"), (0, "x"), (1, "y"), (0, "y")])]  # fmt: skip
    result = grouped(rows)
    assert result.groups == [[0, 3], [1, 5], [2], [4]]
    assert result.index.group_ids == [("x", 0), ("y", 0), ("x", 1), ("y", 1)]
    assert result.index.group_source == "group_index"


def test_rows_without_an_adapter_are_those_of_the_base_model() -> None:
    rows = [new_row(index=k, adapter=lora) for k, lora in enumerate(["x", None, "x", None])]
    result = grouped(rows)
    assert result.groups == [[0, 2], [1, 3]]
    assert result.index.group_ids == [("x", 0), (None, 0)]
    assert grouped(rows[1::2] * 2, [4]).warnings == ()


def test_group_key() -> None:
    """A field of the row, or an entry of its metadata."""
    by_field = [new_row(task="b"), new_row(task="a"), new_row(task="b")]
    result = grouped(by_field, group_key="task")
    assert result.groups == [[0, 2], [1]]
    assert result.index.group_source == "task"
    assert result.index.group_ids == ["b", "a"]
    by_metadata = [new_row(metadata={"task": task}) for task in "bab"]
    assert grouped(by_metadata, group_key="task").groups == [[0, 2], [1]]
    mixed = [by_field[0], by_metadata[1], new_row(metadata=None)]
    with pytest.raises(GroupingError, match=r"'task' is missing on row 2.*\n(.*\n)*.*set task on every row"):
        grouped(mixed, group_key="task", group_fallback="error")


def test_one_rollout_per_group() -> None:
    result = grouped(rows_of((0, 0), (1, 1)), n_samples_per_prompt=4)
    [warning] = result.warnings
    assert warning == (
        "every group has one rollout although n_samples_per_prompt=4, so there is no baseline; does 'group_index' name "
        "the prompt?"
    )
    assert grouped(rows_of((0, 0), (1, 1)), advantage_estimator="ppo").warnings == ()


@pytest.mark.parametrize(
    ("ids", "labels"),
    [
        ([3, 0, 3], [3, 0]),
        ([-1, -2, -1], [-1, -2]),
        (["a", "", "a"], ["a", ""]),
        ([1, "1", 1], [1, "1"]),
        ([np.int32(4), 5, 4], [4, 5]),
        ([torch.tensor(4), torch.tensor([5]), 4], [4, 5]),
        ([np.array(4), np.float32(5.0), 4.0], [4, 5]),
        ([2**63, 2**64, 2**63], [2**63, 2**64]),
        ([2**63 - 1, -(2**63), 2**63 - 1], [2**63 - 1, -(2**63)]),
        ([(1, "a"), (1, "b"), (1, "a")], [(1, "a"), (1, "b")]),
        ([0.5, 1.5, 0.5], [0.5, 1.5]),
        ([math.inf, 0, math.inf], [math.inf, 0]),
    ],
)
def test_ids_of_every_kind(ids: list[Any], labels: list[Any]) -> None:
    groups = grouped([new_row(group_index=i) for i in ids])
    assert groups.groups == [[0, 2], [1]]
    assert groups.index.group_ids == labels
    rollouts = grouped([new_row(rollout_id=i) for i in ids])
    assert rollouts.index.row_rollout.tolist() == [0, 1, 0]
    assert rollouts.index.rollout_ids == labels
    columns = RolloutColumns(group=ids, rollout=ids, reward=[1, 2, 3], trainable_tokens=[1, 1, 1])
    assert normalize_columns(columns).index.rollout_ids == labels


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([3, 0, 3]),
        torch.tensor([3, 0, 3], dtype=torch.uint8),
        torch.tensor([3.0, 0.0, 3.0], dtype=torch.bfloat16),
        np.array([3, 0, 3], dtype=np.uint64),
        np.array([3, 0, 3], dtype=">i4"),
        np.array([3, 0, 3], dtype=object),
        np.array([3.0, 0.0, 3.0]),
        np.array([3, 9, 0, 9, 3])[::2],
        np.array([3, 0, 3])[::-1],
    ],
)
def test_columns_of_ids(ids: Any) -> None:
    columns = RolloutColumns(group=ids, rollout=None, reward=[1.0, 2.0, 3.0], trainable_tokens=[1, 1, 1])
    result = normalize_columns(columns)
    assert result.groups == [[0, 2], [1]]
    assert result.index.group_ids == [3, 0]
    assert result.index.row_rollout.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "ids", [[5, None, 5, None], [5.0, math.nan, 5.0, math.nan], np.array([5.0, np.nan, 5.0, np.nan])]
)
def test_rows_without_an_id_are_rollouts_of_their_own(ids: Any) -> None:
    columns = RolloutColumns(group=[0] * 4, rollout=ids, reward=[1.0] * 4, trainable_tokens=[1] * 4)
    index = normalize_columns(columns).index
    assert index.row_rollout.tolist() == [0, 1, 0, 2]
    assert index.rollout_ids == [5, None, None]


@pytest.mark.parametrize("bad", [True, [1], {"id": 1}, torch.tensor([1, 2]), np.array([1, 2]), {1}, np.bool_(False)])
@pytest.mark.parametrize("field", ["group_index", "rollout_id"])
def test_what_is_no_id(field: str, bad: Any) -> None:
    rows = [new_row(**{field: 1}), new_row(**{field: bad}), new_row(**{field: 2})]
    with pytest.raises(
        SampleError, match=rf"{field.split('_')[0]} id of row 1\n(.*\n)*.*another hashable id"
    ) as raised:
        normalize_rewards(rows)
    assert raised.value.rows == (1,)


def test_unhashable_adapter() -> None:
    with pytest.raises(SampleError, match=r"adapter id of row 0\n"):
        normalize_rewards([new_row(adapter=["x"])])


@pytest.mark.parametrize("far", [1, 2**30, 2**62])
def test_ids_far_apart(far: int) -> None:
    """Two columns of ids, neither sorted; in the last case a pair does not fit one int64 sort key."""
    rows = rows_of((far, -far), (-far, far), (far, far), (-far, far), (far, -far))
    result = grouped(rows)
    assert result.groups == [[0, 2, 4], [1, 3]]
    assert result.index.row_rollout.tolist() == [0, 1, 2, 1, 0]
    assert result.index.group_ids == [far, -far]


def test_view_of_the_index() -> None:
    index = grouped(rows_of((1, "a"), (0, "b"), (1, "a"), (1, "c")), [3, 0, 1]).index
    assert index.rows_of_rollout(0) == [0, 2]
    assert index.rollouts_of_group(0) == [0, 1]
    assert index.rollouts_of_group(1) == []
    assert index.row_group.tolist() == [0, 0, 0, 2]
    assert index.group_first_row.tolist() == [0, 4, 3]
    assert index.first_row.tolist() == [0, 1, 3]
    assert (index.num_rows, index.num_rollouts, index.num_groups) == (4, 3, 3)
