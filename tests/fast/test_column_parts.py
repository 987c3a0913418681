"""Columns that come in parts: joined they are what reading all rows at once gives, pickled they are small."""

import pickle
from typing import Any

import pytest
import torch
from batches import estimator_problems, new_row, problems
from hypothesis import assume, given
from hypothesis import strategies as st

from miles_norm import MilesNormError, NormalizationConfig, RolloutColumns, normalize_columns
from miles_norm.columns import columns_from_samples
from miles_norm.columns.ids import IdColumn
from miles_norm.errors import SampleError


def described(columns: RolloutColumns) -> dict[str, Any]:
    """Every column by its values, ids by their labels."""
    found: dict[str, Any] = {}
    for name in RolloutColumns.__slots__:
        value = getattr(columns, name)
        if isinstance(value, IdColumn):
            value = value.labels_at(torch.arange(len(columns)))
        elif isinstance(value, dict):
            value = {key: column.view(torch.int64).tolist() for key, column in value.items()}
        elif isinstance(value, torch.Tensor):
            value = (value.dtype, (value.view(torch.int64) if value.is_floating_point() else value).tolist())
        found[name] = value
    return found


def outcome(columns: RolloutColumns, config: NormalizationConfig, sizes: Any) -> Any:
    try:
        result = normalize_columns(columns, config, sizes)
    except MilesNormError as error:
        return type(error), str(error), error.rows
    return (
        result.advantages.view(torch.int32).tolist(),
        result.groups,
        result.index.rollout_ids,
        result.index.group_ids,
        [text for text in result.warnings if "count as one rollout" not in text],
        result.metrics() | {"miles_norm/warnings": 0},
        [result.explain(row) for row in range(min(3, len(columns)))],
    )


def cut(data: st.DataObject, count: int) -> list[slice]:
    ends = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4))) if count > 1 else []
    return [slice(start, stop) for start, stop in zip([0, *ends], [*ends, count], strict=True)]


@given(problem=st.one_of(problems(), estimator_problems()), data=st.data())
def test_parts_are_the_whole(problem: Any, data: st.DataObject) -> None:
    batch, config = problem
    parts = [batch.samples[part] for part in cut(data, len(batch.samples))]
    try:
        whole = columns_from_samples(batch.samples, config)
        read = [columns_from_samples(part, config) for part in parts]
    except MilesNormError:
        assume(False)
    joined = RolloutColumns.concat(read)
    # What a collision of ids is can only be seen with both rows side by side.
    expected, found = described(whole), described(joined)
    assert set(found.pop("id_collisions")) <= set(expected.pop("id_collisions"))
    for columns in (expected, found):
        if columns["status"] is not None and set(columns["status"]) == {None}:
            columns["status"] = None
    assert found == expected
    assert outcome(joined, config, batch.sizes) == outcome(whole, config, batch.sizes)


@given(problem=st.one_of(problems(), estimator_problems()), data=st.data())
def test_selected_rows_are_those_rows(problem: Any, data: st.DataObject) -> None:
    batch, config = problem
    assume(batch.samples is batch.rows)
    chosen = data.draw(st.lists(st.sampled_from(range(len(batch.rows))), min_size=1, unique=True))
    try:
        columns = columns_from_samples(batch.rows, config)
        expected = described(columns_from_samples([batch.rows[row] for row in chosen], config))
    except MilesNormError:
        assume(False)
    found = described(columns.select(torch.tensor(chosen)))
    for described_columns in (expected, found):
        # A column that says nothing about these rows may be there, and collisions are of pairs.
        for name, absent in (("scored", True), ("removed", False), ("truncated", False), ("padding", False)):
            flags = described_columns[name]
            described_columns[name] = None if flags is None or set(flags[1]) == {absent} else flags
        for name in ("group", "rollout", "adapter"):
            ids = described_columns[name]
            described_columns[name] = None if ids is None or set(ids) == {None} else ids
        described_columns["without_id"] = sorted(described_columns["without_id"])
        described_columns["odd_masks"] = sorted(described_columns["odd_masks"])
        assert len(described_columns.pop("id_collisions")) <= len(chosen)
    assert found == expected


@given(problem=st.one_of(problems(), estimator_problems()))
def test_pickled_columns_come_back(problem: Any) -> None:
    batch, config = problem
    try:
        columns = columns_from_samples(batch.samples, config)
    except MilesNormError:
        assume(False)
    back = pickle.loads(pickle.dumps(columns))
    assert described(back) == described(columns)
    assert outcome(back, config, batch.sizes) == outcome(columns, config, batch.sizes)


@pytest.mark.parametrize("wide", [False, True])
def test_pickled_columns_are_at_most_64_bytes_a_row(wide: bool) -> None:
    rows = torch.arange(20_000)
    flags = dict.fromkeys(("scored", "removed", "truncated", "padding"), rows % 7 == 0)
    ids = {"group": rows // 16, "rollout": rows // 2, "adapter": rows % 2}
    if wide:
        ids = {name: column * 2**40 for name, column in ids.items()}
    columns = RolloutColumns(reward=rows / 3, trainable_tokens=rows * 100_000, **ids, **flags)
    # 8 for the reward, 4 for the tokens; ids 2 + 2 + 1 or 8 each; four flags of a bit each.
    expected = 8 + 4 + (24 if wide else 5) + 0.5
    assert len(pickle.dumps(columns)) / len(rows) == pytest.approx(expected, abs=0.1)
    assert expected < 64


def test_ids_that_are_text_are_sent_once() -> None:
    names = [f"prompt-{n // 50:028d}" for n in range(10_000)]
    columns = RolloutColumns(group=names, rollout=None, reward=[0.0] * 10_000, trainable_tokens=[1] * 10_000)
    # 200 names of 35 letters: less than a byte a row, beside 8 for the reward and a byte each for code and tokens.
    assert len(pickle.dumps(columns)) / 10_000 < 12


def test_ids_of_different_kinds_and_absent_columns() -> None:
    def part(**columns: Any) -> RolloutColumns:
        return RolloutColumns(
            **{"group": None, "rollout": None, "trainable_tokens": [1, 1], "reward": [0, 1]} | columns
        )

    joined = RolloutColumns.concat([
        part(group=[5, 6], rollout=[5, None], scored=[True, False]),
        part(group=["a", 5], adapter=["x", None]),
        part(rollout=[2**70, 5]),
    ])  # fmt: skip
    rows = torch.arange(6)
    assert joined.group is not None
    assert joined.group.labels_at(rows) == [5, 6, "a", 5, None, None]
    assert joined.rollout is not None
    assert joined.rollout.labels_at(rows) == [5, None, None, None, 2**70, 5]
    assert joined.adapter is not None
    assert joined.adapter.labels_at(rows) == [None, None, "x", None, None, None]
    assert joined.scored is not None
    assert joined.scored.tolist() == [True, False, True, True, True, True]
    # Equal ids have equal codes, and rows without an id are alike to none.
    for column, distinct in ((joined.group, 5), (joined.rollout, 5), (joined.adapter, 6)):
        assert len(set(column.codes.tolist())) == distinct


def test_integers_at_the_end_of_int64_leave_room_for_rows_without_an_id() -> None:
    part = RolloutColumns(group=[0], rollout=torch.tensor([2**63 - 1]), reward=[1.0], trainable_tokens=[1])
    other = RolloutColumns(group=[0], rollout=None, reward=[1.0], trainable_tokens=[1])
    joined = RolloutColumns.concat([part, other, part])
    assert joined.rollout is not None
    assert joined.rollout.labels_at(torch.arange(3)) == [2**63 - 1, None, 2**63 - 1]
    assert joined.rollout.codes[0] == joined.rollout.codes[2] != joined.rollout.codes[1]


def test_lists_of_several_parts_are_several_rollouts() -> None:
    parts = [columns_from_samples([[[new_row(), new_row(reward=0.0)], new_row(index=3)]]) for _ in range(2)]
    joined = RolloutColumns.concat(parts)
    assert joined.nested_sizes == (3, 3)
    result = normalize_columns(joined)
    assert result.groups == [[0, 1, 2], [3, 4, 5]]
    # The one of index 3 is in both groups, the lists are four rollouts' own.
    assert [text for text in result.warnings if "several prompt groups" in text] == [
        "an id in several prompt groups counts as different rollouts: rollout id 3"
    ]


def test_parts_that_do_not_fit_are_refused() -> None:
    plain = {"group": [0], "rollout": [0], "reward": [1.0], "trainable_tokens": [1]}
    one = RolloutColumns(**plain)
    with pytest.raises(SampleError, match="no parts"):
        RolloutColumns.concat([])
    with pytest.raises(SampleError, match="reward components a, b and none"):
        RolloutColumns.concat([one, RolloutColumns(**plain, components={"b": [1.0], "a": [2.0]})])
    with pytest.raises(SampleError, match="1 nested parts of 2"):
        RolloutColumns.concat([one, columns_from_samples([[new_row()]])])
