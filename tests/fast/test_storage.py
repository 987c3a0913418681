"""Files of train data and rollout dumps in columns: types and bits come back, damaged files give one error."""

import enum
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from stored_values import canon, dumps, small, train_data

from miles_norm.dumps import RolloutDump, read_dump, write_dump
from miles_norm.errors import DumpError, MissingDependencyError, SampleError
from miles_norm.storage import iter_train_data, parquet_file, read_train_data, write_train_data
from miles_norm.storage.table import field_names
from miles_norm.train_data import TrainData
from miles_norm.train_data.ragged import Ragged

HERE = Path(__file__).parent
SESSION = HERE.parents[1] / "examples/data/miles_session_v2.pt"
REAL = [SESSION, *(HERE / "data" / f"{name}.pt" for name in ("miles_mainstream", "miles_multi_lora", "slime_dump"))]
FORMATS = [".safetensors", ".parquet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=25)
@given(data=train_data())
def test_train_data_round_trips(suffix, folder, data):
    path = folder / f"x{suffix}"
    write_train_data(data, path)
    found = read_train_data(path)
    assert canon(found.columns) == canon(data.columns)
    assert canon(found.step) == canon(data.step)
    # A list that backs a column comes back flat, with the same numbers.
    assert canon(found["tokens"].tolists()) == canon(data["tokens"].tolists())
    parts = list(iter_train_data(path))
    if parts:
        assert canon(TrainData.concat(parts).columns) == canon(data.columns) or not len(data)


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=25)
@given(dump=dumps())
def test_dump_round_trips(suffix, folder, dump):
    write_dump(dump, folder / f"y{suffix}")
    found = read_dump(folder / f"y{suffix}")
    assert canon(found.samples) == canon(dump.samples)
    assert canon((found.rollout_id, found.metadata)) == canon((dump.rollout_id, dump.metadata))


def referenced(value):
    return value.__getstate__()


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_dump_round_trips(path, suffix, tmp_path):
    dump = read_dump(path)
    write_dump(dump, tmp_path / f"copy{suffix}")
    copy = read_dump(tmp_path / f"copy{suffix}")
    # Through JSON text, so that 0 and 0.0, None and missing, and the order of keys count.
    assert json.dumps(copy.samples) == json.dumps(dump.samples, default=referenced)
    assert (copy.rollout_id, copy.metadata) == (dump.rollout_id, dump.metadata)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"copy{suffix}"]


def test_parquet_is_readable_by_other_programs(tmp_path):
    write_train_data(small(rewards=torch.tensor([0.5, -0.5]), names=["x", None]), tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert [str(kind) for kind in table.schema.types] == [
        "large_list<element: int64 not null>", "int64", "large_list<element: float not null>", "large_string", "float",
        "large_string",
    ]  # fmt: skip
    assert table.column("tokens").to_pylist() == [[0, 1, 2], [3, 4]]
    assert table.column("rollout_ids").to_pylist() == ['"a"', "1"]
    assert table.column("names").to_pylist() == ["x", None]
    assert json.loads(table.schema.metadata[b"miles_norm"])["version"] == 1
    assert json.loads(table.schema.metadata[b"miles_norm.head"]) == {"prompt_group_sizes": [2]}


def test_safetensors_is_readable_by_other_programs(tmp_path):
    write_train_data(small(), tmp_path / "x.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert tensors["tokens.values"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["tokens.offsets"].tolist() == [0, 3, 5]


def test_safetensors_is_mapped_and_private(tmp_path):
    path = tmp_path / "x.safetensors"
    values = torch.arange(4_000_000)
    offsets = torch.arange(0, 4_000_001, 8000)
    data = TrainData({"tokens": Ragged(values, offsets), "response_lengths": [0] * 500})
    write_train_data(data, path)
    before = path.read_bytes()
    found = read_train_data(path)
    if Path("/proc/self/maps").exists():
        # A line is "start-end rights offset device inode path"; the tokens lie inside the mapping of the file.
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        assert any(start <= found["tokens"].values.data_ptr() < end for start, end in ranges)
    assert found["tokens"].select(slice(1, 2)).tolists() == [list(range(8000, 16000))]
    # Writing changes this process's copy only, and the mapping outlives the file.
    found["tokens"].values[0] = 7
    assert path.read_bytes() == before
    path.unlink()
    assert found["tokens"].values[[0, -1]].tolist() == [7, 3_999_999]


@pytest.mark.parametrize("suffix", FORMATS)
def test_some_columns_only(suffix, tmp_path):
    write_train_data(small(**{"a.b": [1, 2], "a": [3, 4]}), tmp_path / f"x{suffix}")
    found = read_train_data(tmp_path / f"x{suffix}", columns=["a"])
    assert list(found.columns) == ["tokens", "response_lengths", "a"]
    assert found["a"] == [3, 4]
    assert [len(part.columns) for part in iter_train_data(tmp_path / f"x{suffix}", columns=["a.b"])] == [3]
    with pytest.raises(DumpError, match=r"no column b, c; it has tokens, response_lengths, a\n"):
        read_train_data(tmp_path / f"x{suffix}", columns=["c", "b", "a"])


def test_row_groups_are_bounded(tmp_path, monkeypatch):
    # Costs per row are list entries: 3 + 2 and 2 + 1 and the bytes of JSON text; 2 rows of 8 fit into 16.
    monkeypatch.setattr(parquet_file, "_GROUP_VALUES", 16)
    lengths = [5, 3, 0, 30, 1, 1]
    bounds = [0, *itertools.accumulate(lengths)]
    data = TrainData({"tokens": Ragged(torch.arange(40), bounds), "response_lengths": [0] * 6})
    seen = []
    write_train_data(data, tmp_path / "x.parquet", progress=lambda done, total: seen.append((done, total)))
    # 5 + 3 + 0 are below 16; 30 alone is above it; 1 + 1 are the rest.
    parts = list(iter_train_data(tmp_path / "x.parquet"))
    assert [part["tokens"].lengths.tolist() for part in parts] == [[5, 3, 0], [30], [1, 1]]
    assert seen == [(3, 6), (4, 6), (6, 6), (6, 6)]
    assert canon(read_train_data(tmp_path / "x.parquet").columns) == canon(data.columns)
    monkeypatch.setattr(parquet_file, "_GROUP_ROWS", 2)
    write_train_data(data, tmp_path / "x.parquet")
    assert [len(part) for part in iter_train_data(tmp_path / "x.parquet")] == [2, 1, 1, 2]


def test_dump_is_read_group_by_group(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "_GROUP_ROWS", 2)
    rows = [{"a": 1}, {"b": [1, 2]}, {"b": None, "a": 2}, {}, {"a": 3}]
    write_dump(RolloutDump(rows, 4, {"c": 5}), tmp_path / "x.parquet")
    seen = []
    found = read_dump(tmp_path / "x.parquet", progress=lambda done, total: seen.append((done, total)))
    assert canon(found.samples) == canon(rows)
    assert (found.rollout_id, found.metadata) == (4, {"c": 5})
    size = (tmp_path / "x.parquet").stat().st_size
    # Three groups of at most 2 rows; the first and last calls are those of every format.
    assert seen == [(0, size), (size // 3, size), (2 * size // 3, size), (size, size), (size, size)]


def test_parts_of_a_mapped_file_are_views(tmp_path):
    write_train_data(
        TrainData({"tokens": Ragged(torch.arange(3000), torch.arange(3001)), "response_lengths": [1] * 3000}),
        tmp_path / "x.safetensors",
    )
    parts = list(iter_train_data(tmp_path / "x.safetensors"))
    assert [len(part) for part in parts] == [1024, 1024, 952]
    assert parts[2]["tokens"].values[-1] == 2999


@pytest.mark.parametrize("suffix", FORMATS)
def test_columns_that_share_memory(suffix, tmp_path):
    tokens = Ragged(torch.arange(6), [0, 3, 6])
    data = TrainData({"tokens": tokens, "response_lengths": [3, 3], "loss_masks": Ragged(tokens.values, tokens.offsets),
                      "turned": torch.arange(6).reshape(3, 2).T})  # fmt: skip
    write_train_data(data.select([1]), tmp_path / f"y{suffix}")
    write_train_data(data, tmp_path / f"x{suffix}")
    assert canon(read_train_data(tmp_path / f"x{suffix}").columns) == canon(data.columns)


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Note:
    text: str
    colour: Colour


@pytest.mark.parametrize("suffix", FORMATS)
def test_objects_become_plain_or_are_named(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    write_train_data(small(metadata=[Note("a", Colour.RED), None]), path)
    assert read_train_data(path)["metadata"] == [{"text": "a", "colour": "red"}, None]
    before = path.read_bytes()
    with pytest.raises(DumpError, match=r"rows 0, 1, column 'metadata\.k': a value of type object") as caught:
        write_train_data(small(metadata=[{"k": object()}, {"j": object()}]), path)
    assert caught.value.rows == (0, 1)
    with pytest.raises(DumpError, match=r"step, key 'k': a value of type object"):
        write_train_data(TrainData(small().columns, {"k": object()}), path)
    with pytest.raises(DumpError, match=r"column 'x': dtype torch\.complex64"):
        write_train_data(small(x=torch.ones(2, dtype=torch.complex64)), path)
    with pytest.raises(SampleError, match="row 1 of a ragged column"):
        write_train_data(small(tokens=Ragged.from_rows([[1, 2], [0.5, 1]], torch.int64)), path)
    with pytest.raises(DumpError, match="row 1, key 'k': a tensor that is sparse"):
        write_dump(RolloutDump([{}, {"k": torch.ones(1).to_sparse()}]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", FORMATS)
def test_integers_without_bounds(suffix, tmp_path):
    # Longer than Python prints or parses.
    write_dump(RolloutDump([{"k": 10**5000}, {"k": -(2**63) - 1}]), tmp_path / f"x{suffix}")
    assert [row["k"] for row in read_dump(tmp_path / f"x{suffix}").samples] == [10**5000, -(2**63) - 1]


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_of_another_kind(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    write_train_data(small(), path)
    with pytest.raises(
        DumpError, match=r"got: +train data\n +expected: a rollout dump(.|\n)*converted from.*read_train_data"
    ):
        read_dump(path)
    write_dump(RolloutDump([{"a": 1}]), path)
    with pytest.raises(
        DumpError, match=r"got: +a rollout dump\n +expected: train data(.|\n)*miles-norm convert.*read_dump"
    ):
        read_train_data(path)
    for reader in (read_train_data, read_dump, lambda path: list(iter_train_data(path))):
        with pytest.raises(DumpError, match="No such file"):
            reader(tmp_path / f"none{suffix}")
        path.write_bytes(b"")
        with pytest.raises(DumpError, match="an empty file"):
            reader(path)
        path.write_bytes(b"PAR1" * 20)
        with pytest.raises(DumpError, match="fails to load with"):
            reader(path)
    for function in (read_train_data, lambda path: write_train_data(small(), path), lambda p: list(iter_train_data(p))):
        with pytest.raises(DumpError, match=r"ends in \.safetensors or \.parquet"):
            function(tmp_path / "x.pt")
    with pytest.raises(DumpError, match=r"remedy: +name the output with one of these endings"):
        write_train_data(small(), tmp_path / "x.pt")


def test_files_from_elsewhere(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(DumpError, match="did not write"):
        read_dump(tmp_path / "x.safetensors")
    rows = [{"tokens": [1, 2], "reward": 0.5, "metadata": {"a": 1}}, {"tokens": [3], "reward": None, "metadata": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=1)
    assert read_dump(tmp_path / "x.parquet") == RolloutDump(rows)
    with pytest.raises(DumpError, match="did not write"):
        read_train_data(tmp_path / "x.parquet")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "x.parquet")
    with pytest.raises(DumpError, match="a dump without rows"):
        read_dump(tmp_path / "x.parquet")


@pytest.mark.parametrize(("suffix", "package", "extra"), [(FORMATS[0], "safetensors", "safetensors"),
                                                          (FORMATS[1], "pyarrow", "parquet")])  # fmt: skip
def test_without_the_package(suffix, package, extra, tmp_path, monkeypatch):
    path = tmp_path / f"x{suffix}"
    write_train_data(small(), path)
    monkeypatch.setitem(sys.modules, package, None)
    for call in (
        lambda: read_train_data(path),
        lambda: list(iter_train_data(path)),
        lambda: read_dump(path),
        lambda: write_train_data(small(), tmp_path / f"y{suffix}"),
        lambda: write_dump(RolloutDump([{}]), tmp_path / f"y{suffix}"),
    ):
        with pytest.raises(MissingDependencyError, match=rf"miles-norm\[{extra}\]"):
            call()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    for suffix in FORMATS:
        with pytest.raises(DumpError, match="No such file or directory"):
            write_train_data(small(), tmp_path / "none" / f"x{suffix}")
    path = tmp_path / "x.parquet"
    write_train_data(small(), path)
    before = path.read_bytes()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_train_data(small(), path, progress=stop)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_fields_are_unique():
    # "a" and "a" after cleaning, then the number that the second would take.
    assert field_names(["a b", "a.b", "a_b_2", "a?b", ""]) == ["a_b", "a_b_2", "a_b_2_2", "a_b_3", "_"]
