"""Columnar dumps are read by their index fields, part after part, and written again with columns added."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dump_files import REAL, plain
from rich.console import Console

from miles_norm import NormalizationConfig, RolloutColumns, RolloutDump, normalize_columns, read_dump, write_dump
from miles_norm.cli import waiting
from miles_norm.cli.inputs import load
from miles_norm.columns import columns_from_fields, columns_from_rows, index_fields
from miles_norm.errors import DumpError, MissingRewardError, SampleError
from miles_norm.storage import field_tables
from miles_norm.storage.appending import append_columns
from miles_norm.storage.field_tables import stream_fields
from miles_norm.storage.table import StoredColumn

CONFIG = NormalizationConfig(missing_reward="exclude")


def columns_of(path: Path, config: NormalizationConfig) -> RolloutColumns:
    stream = stream_fields(path, index_fields(config))
    assert stream is not None
    return RolloutColumns.concat([columns_from_fields(t.fields.get, t.num_rows, config) for t in stream.tables])


def same(one: RolloutColumns, other: RolloutColumns, config: NormalizationConfig) -> bool:
    found, expected = normalize_columns(one, config), normalize_columns(other, config)
    return (
        torch.equal(found.advantages, expected.advantages)
        and torch.equal(found.trainable_tokens, expected.trainable_tokens)
        and found.index.rollout_ids == expected.index.rollout_ids
        and found.index.group_ids == expected.index.group_ids
        and found.warnings == expected.warnings
    )


def foreign(rows: list[dict[str, Any]], path: Path, **settings: Any) -> Path:
    """A Parquet file as other programs write it: the fields that Arrow can hold."""
    names = ("group_index", "index", "rollout_id", "reward", "loss_mask", "response_length", "remove_sample", "status")
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path, **settings)
    return path


@pytest.mark.parametrize("source", REAL, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", [".parquet", ".safetensors", "foreign"])
@pytest.mark.parametrize("part_rows", [7, 1 << 16])
def test_index_fields_of_real_dumps(
    source: Path, kind: str, part_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_tables, "_PART_ROWS", part_rows)
    dump = read_dump(source)
    path = tmp_path / f"dump{'.parquet' if kind == 'foreign' else kind}"
    if kind == "foreign":
        foreign(dump.samples, path, row_group_size=part_rows)
    else:
        write_dump(dump, path)
        stream = stream_fields(path, ["reward"])
        assert stream is not None
        assert (stream.rollout_id, stream.metadata) == (dump.rollout_id, plain(dump.metadata))
    assert same(columns_of(path, CONFIG), columns_from_rows(read_dump(path).samples, CONFIG), CONFIG)


def test_other_formats_have_no_columns(tmp_path: Path) -> None:
    assert stream_fields(REAL[0], ["reward"]) is None
    with pytest.raises(DumpError, match=r"(?i)no such file"):
        stream_fields(tmp_path / "none.parquet", ["reward"])


def rows_with(**fields: Any) -> list[dict[str, Any]]:
    return [
        {"group_index": n // 2, "index": n, "reward": float(n % 2), "response_length": 3, "tokens": [1] * 5, **fields}
        for n in range(6)
    ]


def test_masks_of_all_kinds(tmp_path: Path) -> None:
    masks: list[Any] = [[1, 0, 1], None, [], [1], [0.0, 1.0], [True]]
    rows = [row | {"loss_mask": mask} for row, mask in zip(rows_with(), masks, strict=True)]
    for kind in (".parquet", ".safetensors"):
        write_dump(RolloutDump(rows), tmp_path / f"mixed{kind}")
        assert columns_of(tmp_path / f"mixed{kind}", CONFIG).trainable_tokens.tolist() == [2, 3, 0, 1, 1, 1]
    small = pa.array([[1, 0, 1], None], pa.list_(pa.int8()))
    table = pa.table({"reward": [1.0, 0.0], "index": [0, 1], "loss_mask": small, "response_length": [3, 4]})
    pq.write_table(table, tmp_path / "foreign.parquet")
    assert columns_of(tmp_path / "foreign.parquet", CONFIG).trainable_tokens.tolist() == [2, 4]


def test_a_group_key_in_the_metadata(tmp_path: Path) -> None:
    rows = [row | {"metadata": {"prompt": f"p{n // 3}", "image": torch.ones(2)}} for n, row in enumerate(rows_with())]
    config = NormalizationConfig(group_key="prompt")
    for kind in (".parquet", ".safetensors"):
        write_dump(RolloutDump(rows), tmp_path / f"dump{kind}")
        assert normalize_columns(columns_of(tmp_path / f"dump{kind}", config), config).groups == [[0, 1, 2], [3, 4, 5]]


def test_tokens_are_not_read(tmp_path: Path) -> None:
    """A page of tokens that is damaged is found by whoever reads it, and nobody does."""
    rng = np.random.default_rng(0)
    rows = [row | {"tokens": rng.integers(0, 99_999, 500).tolist()} for row in rows_with()]
    path = tmp_path / "dump.parquet"
    write_dump(RolloutDump(rows), path)
    chunk = next(
        column
        for number in range(pq.ParquetFile(path).metadata.num_columns)
        if (column := pq.ParquetFile(path).metadata.row_group(0).column(number)).path_in_schema.startswith("tokens")
    )
    data = bytearray(path.read_bytes())
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(data)
    assert load(path, NormalizationConfig(), None).result.advantages.shape == (6,)
    with pytest.raises(DumpError):
        read_dump(path)


@pytest.mark.parametrize("kind", [".parquet", ".safetensors"])
def test_wrong_rows_are_named_by_their_number_in_the_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_tables, "_PART_ROWS", 2)
    rows = rows_with(loss_mask=[1, 0, 1])
    rows[3]["loss_mask"], rows[5]["loss_mask"] = [1, 2, 0], [3]
    write_dump(RolloutDump(rows), tmp_path / f"dump{kind}")
    with pytest.raises(SampleError, match="trainable tokens of rows 3, 5"):
        load(tmp_path / f"dump{kind}", NormalizationConfig(), None)
    rows = rows_with()
    rows[4]["reward"] = None
    write_dump(RolloutDump(rows), tmp_path / f"dump{kind}")
    with pytest.raises(MissingRewardError, match="reward of row 4"):
        load(tmp_path / f"dump{kind}", NormalizationConfig(), None)


def added(count: int) -> list[StoredColumn]:
    scored = torch.arange(count) != 1
    return [
        StoredColumn("advantage", "float", torch.arange(count, dtype=torch.float64) / 4),
        StoredColumn("trained", "bool", torch.arange(count) % 2 == 0),
        StoredColumn("rollout_reward", "float", torch.full((count,), 0.5, dtype=torch.float64), None, scored),
    ]


def with_added(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "advantage": n / 4, "trained": n % 2 == 0, "rollout_reward": None if n == 1 else 0.5}
        for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize("source", REAL, ids=lambda path: path.stem)
def test_columns_added_to_real_dumps(source: Path, tmp_path: Path) -> None:
    dump = read_dump(source)
    before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
    write_dump(dump, before)
    append_columns(before, after, added(len(dump.samples)))
    found = read_dump(after)
    assert (found.rollout_id, found.metadata) == (dump.rollout_id, plain(dump.metadata))
    expected = with_added(read_dump(before).samples)
    assert json.dumps(found.samples, default=str) == json.dumps(expected, default=str)


def test_columns_that_are_there_are_replaced(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = rows_with()
    rows[0] = {"trained": "yes", **rows[0]}
    rows[2] = rows[2] | {"advantage": [1, 2], "a b": 1, "a.b": 2}
    before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
    write_dump(RolloutDump(rows, 3, {"k": 1}), before)
    append_columns(before, after, added(6))
    found = read_dump(after)
    assert found.samples == with_added(rows)
    assert list(found.samples[0]) == list(with_added(rows)[0])
    assert (found.rollout_id, found.metadata) == (3, {"k": 1})


def test_files_of_other_programs_keep_their_types(tmp_path: Path) -> None:
    rows = rows_with(loss_mask=[1, 0, 1], advantage="old")
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"of": "another program"})
    before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
    pq.write_table(table, before, row_group_size=4)
    shown = []
    append_columns(before, after, added(6), progress=lambda done, total: shown.append((done, total)))
    found = pq.read_table(after)
    assert found.schema.metadata[b"of"] == b"another program"
    assert found.schema.field("loss_mask").type == table.schema.field("loss_mask").type
    assert found.schema.field("advantage").type == pa.float64()
    assert found.to_pylist() == with_added(rows)
    assert shown[-1] == (6, 6)


def test_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_dump(RolloutDump(rows_with()), path)
    with pytest.raises(DumpError, match="6 rows, and values for 5"):
        append_columns(path, tmp_path / "out.parquet", added(5))
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("kind", [".parquet", ".safetensors"])
def test_the_command_line_shows_a_bar(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=80)
    moved = []
    monkeypatch.setattr(waiting, "console_for", lambda **_: console)
    monkeypatch.setattr(waiting, "_REFRESH", 0.0)
    monkeypatch.setattr(
        waiting.Progress, "update", lambda self, task, *, completed, total: moved.append((completed, total))
    )
    monkeypatch.setattr(field_tables, "_PART_ROWS", 2)
    write_dump(RolloutDump(rows_with()), tmp_path / f"dump{kind}")
    load(tmp_path / f"dump{kind}", NormalizationConfig(), None)
    # One row group in a small Parquet file, three parts of the other.
    assert moved == ([(1, 1)] if kind == ".parquet" else [(2, 6), (4, 6), (6, 6)])
