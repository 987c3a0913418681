"""Files of train data and dumps that are cut, flipped or crafted: data or one DumpError, and nothing of them runs."""

import json
import random
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from stored_values import canon, small

from miles_norm.dumps import RolloutDump, read_dump, write_dump
from miles_norm.errors import DumpError
from miles_norm.storage import iter_train_data, read_train_data, write_train_data

HERE = Path(__file__).parent
LORA = HERE / "data/miles_multi_lora.pt"
FORMATS = [".safetensors", ".parquet"]


def rewritten(path, change):
    """The file with another layout, head and tensors."""
    with safetensors.safe_open(path, "pt") as file:
        layout = json.loads(file.metadata()["miles_norm"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    head = json.loads(tensors["head"].numpy().tobytes())
    head = change(layout, tensors, head) or head
    tensors["head"] = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    safetensors.torch.save_file(tensors, path, {"miles_norm": json.dumps(layout)})


def change_layout(**entries):
    return lambda layout, tensors, head: layout.update(entries)


def change_column(number, **entries):
    return lambda layout, tensors, head: layout["columns"][number].update(entries)


def change_tensor(name, value):
    return lambda layout, tensors, head: tensors.update({name: value})


def change_head(value):
    return lambda layout, tensors, head: value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (change_layout(version=2), "format version 2; this is version 1"),
        (change_layout(version="1"), "version '1'"),
        (change_layout(rows=3), "another number of rows than 3"),
        (change_layout(rows=-1), "with -1 rows"),
        (change_layout(format="other"), "the format 'other'"),
        (change_layout(columns=[]), "no column tokens"),
        (change_layout(columns=None), "TypeError"),
        (change_column(0, dtype="int32"), "column 'tokens' has dtype torch.int64"),
        (change_column(0, shape=[2]), "column 'tokens'"),
        (change_column(0, shape=[-1]), r"shape \[-1\]"),
        (change_column(0, cell="tensor"), "offsets that do not fit its kind"),
        (change_column(1, cell="ragged"), "offsets that do not fit its kind"),
        (change_column(0, cell="eval"), "of 'eval'"),
        (change_column(0, field="head"), "names of columns that do not fit"),
        (change_column(0, name=3), "the column 3"),
        (change_column(0, name="rollout_ids"), "names of columns"),
        (change_tensor("tokens.offsets", torch.tensor([0, 4, 3])), "an end before|0 to 3"),
        (change_tensor("tokens.offsets", torch.tensor([0, 2**62, 5])), "an end before"),
        (change_tensor("tokens.valid", torch.tensor([True, False])), "rows that are None"),
        (change_tensor("tokens.valid", torch.tensor([True])), "another number of rows"),
        (change_tensor("rollout_ids.values", torch.tensor([123, 123], dtype=torch.uint8)), "SampleError"),
        (change_head([1]), "a step that is no mapping"),
        (change_head({"$": "kept", "number": 9}), "SafetensorError"),
        (change_head({"$": "kept", "number": "../x"}), "SafetensorError"),
        (change_head({"$": "os.system", "args": ["x"]}), "an unknown type 'os.system'"),
        (change_head({"$": "array", "dtype": "O", "shape": [1], "data": ""}), "unknown type"),
        (change_head({"$": "array", "dtype": "<i8", "shape": [2**60], "data": ""}), "the shape"),
        (change_head({"$": "array", "dtype": "<i8", "shape": [2**40], "data": ""}), "not fill"),
        (change_head({"$": "tensor", "dtype": "int8", "shape": [9], "data": "AA=="}), "not fill"),
        (change_head({"$": "tensor", "dtype": "bool", "shape": [1], "data": "Ag=="}), "0 and 1"),
        (change_head({"$": "dict", "items": [[[], 1]]}), "unhashable"),
        (change_head({"$": "bytes", "data": "?"}), "fails to load with Error"),
        (change_head({"tokens": 1}), "tokens in columns and in step"),
    ],
)  # fmt: skip
def test_crafted_safetensors(change, text, tmp_path):
    path = tmp_path / "x.safetensors"
    write_train_data(small(), path)
    rewritten(path, change)
    with pytest.raises(DumpError, match=text):
        read_train_data(path)


def test_crafted_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    write_train_data(small(flags=torch.tensor([True, False])), path)
    path.write_bytes(_with_flag(path, 7))
    with pytest.raises(DumpError, match="a bool tensor with bytes other than 0 and 1"):
        read_train_data(path)
    path.write_bytes(struct.pack("<Q", 40) + b"[" * 40)
    with pytest.raises(DumpError, match="SafetensorError"):
        read_train_data(path)
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(DumpError, match="SafetensorError"):
        read_train_data(path)
    # JSON that is nested too deeply for Python.
    write_train_data(small(), path)
    deep = b"[" * 10**6
    with safetensors.safe_open(path, "pt") as file:
        layout = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    tensors["head"] = torch.frombuffer(bytearray(deep), dtype=torch.uint8)
    safetensors.torch.save_file(tensors, path, layout)
    with pytest.raises(DumpError, match="RecursionError"):
        read_train_data(path)


def _with_flag(path, value):
    data = bytearray(path.read_bytes())
    size = struct.unpack_from("<Q", data)[0]
    start = json.loads(data[8 : 8 + size])["flags.values"]["data_offsets"][0]
    data[8 + size + start] = value
    return bytes(data)


def parquet_with(path, arrays, **layout):
    write_train_data(small(), path)
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    metadata[b"miles_norm"] = json.dumps({**json.loads(metadata[b"miles_norm"]), **layout})
    arrays = {**dict(zip(table.column_names, table.columns, strict=True)), **arrays}
    kept = {name: array for name, array in arrays.items() if array is not None}
    pq.write_table(pa.table(kept).replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize(
    ("columns", "layout", "text"),
    [
        ({"tokens": pa.array([[1, None, 2], [3, 4]], pa.large_list(pa.int64()))}, {}, "null"),
        ({"tokens": pa.array([[0, 1, 2], None], pa.large_list(pa.int64()))}, {}, "rows that are None"),
        ({"tokens": pa.array([[0.5], [1.5]])}, {}, "ArrowInvalid"),
        ({"tokens": pa.array(["a", "b"])}, {}, "Arrow"),
        ({"tokens": None}, {}, "KeyError|ArrowInvalid"),
        ({"rollout_ids": pa.array(['"a"', "{"])}, {}, "JSONDecodeError"),
        ({"response_lengths": pa.array([2, 5])}, {}, "SampleError: tokens of row 1"),
        ({}, {"rows": 3}, "2 rows, not 3"),
        ({}, {"columns": [{"name": "tokens", "field": "tokens", "cell": "ragged", "dtype": "int64", "shape": [2]}]},
         "do not fill the shape"),
    ],
)  # fmt: skip
def test_crafted_parquet(columns, layout, text, tmp_path):
    path = parquet_with(tmp_path / "x.parquet", columns, **layout)
    with pytest.raises(DumpError, match=text):
        read_train_data(path)
    with pytest.raises(DumpError, match=text):
        list(iter_train_data(path))


def test_parquet_that_other_programs_wrote_again(tmp_path):
    # Lists with 32-bit offsets, and dictionary text, are what many writers make of the same columns.
    path = parquet_with(tmp_path / "x.parquet", {
        "tokens": pa.array([[0, 1, 2], [3, 4]], pa.list_(pa.int32())),
        "rollout_ids": pa.array(['"a"', "1"]).dictionary_encode(),
    })  # fmt: skip
    assert canon(read_train_data(path).as_miles_dict()) == canon(small().as_miles_dict())


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("kind", ["train data", "dump"])
def test_cut_and_flipped_files_give_data_or_one_error(kind, suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    if kind == "train data":
        write_train_data(small(metadata=[{"a": (1, 2)}, None], flags=torch.tensor([True, False])), path)
    else:
        write_dump(RolloutDump(read_dump(LORA).samples[:4], 1, {"prompt_group_sizes": [4]}), path)
    read = read_train_data if kind == "train data" else read_dump
    whole, chance = path.read_bytes(), random.Random(31)
    refused = 0
    for number in range(150):
        damaged = bytearray(whole)
        if number % 3 == 0:
            del damaged[chance.randrange(1, len(whole)) :]
        for _ in range(0 if number % 3 == 0 else chance.choice([1, 2, 8])):
            # Every second flip is near the end or the beginning, where the formats keep their headers.
            near = chance.randrange(min(2000, len(damaged)))
            where = chance.choice([chance.randrange(len(damaged)), near, len(damaged) - 1 - near])
            damaged[where] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read(path)
        except DumpError:
            refused += 1
    assert refused > 75
