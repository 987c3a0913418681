"""Damaged files of every kind give one clear error."""

import gzip
import json
import os
import pickle
import random
import sys
import zipfile

import pytest
import torch
from dump_files import LORA, SESSION, archive, saved

from miles_norm.dumps import RolloutDump, read_dump, write_dump
from miles_norm.errors import DumpError, MissingDependencyError


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"{}", "the file name 'x.json'"),
        ("x.pt", b"", "an empty file"),
        ("x.jsonl", b"", "an empty file"),
        ("x.pt", pickle.dumps({"samples": [{}]}), "a bare pickle"),
        ("x.pt", b"hello", "a file that is not a zip archive"),
        ("x.pt", SESSION.read_bytes()[:90_000], "a zip archive without its end"),
        ("x.jsonl", b"\n  \n", "a dump without rows"),
        ("x.jsonl", b'{"a": 1}\n\n{"a": \n{"a": 2}\nx\n', "line 3: no JSON, Expecting value at column 6; also line 5"),
        ("x.jsonl", b'{"rollout_id": 1, "samples": []}', "line 1: a whole dump in one line, not one row"),
        ("x.jsonl", b"[1]\n", "line 1: a JSON array, not an object"),
        ("x.jsonl", b"{}\n7\n", "line 2: a JSON number, not an object"),
        ("x.jsonl", b"{}\ntrue\n", "line 2: a JSON boolean, not an object"),
        ("x.jsonl", b'{"a": "\xff"}\n', "line 1: not UTF-8, invalid start byte at byte 7"),
        ("x.jsonl", b'{"a": ' + b"[" * 200_000 + b"\n", "line 1: JSON nested too deeply"),
        ("x.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n", "line 1: Exceeds the limit"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "breaks off or is damaged after 9"),
        ("x.jsonl.gz", b"plain text", "damaged after 0 whole lines: Not a gzipped file"),
        ("x.jsonl.zst", b"plain text", "damaged after 0 whole lines: zstd"),
    ],
)
def test_damaged_file(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpError, match=message) as caught:
        read_dump(tmp_path / name)
    assert type(caught.value) is DumpError
    parts = [line.split()[0] for line in str(caught.value).splitlines()]
    assert parts == ["rollout", "got:", "expected:", "reason:", "remedy:"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"a": 1}], "a list"),
        (torch.ones(2), "a Tensor"),
        ({"rows": []}, "a dict with the keys 'rows'"),
        ({"samples": {"a": 1}}, "samples of type dict"),
        ({"samples": torch.ones(2)}, "samples of type Tensor"),
        ({"samples": []}, "a dump without rows"),
        ({"samples": [{}, 1, {}, [2], {3: 4}]}, "rows 1, 3, 4; row 1 is of type int"),
        ({"samples": [{}], "rollout_id": "7"}, "a rollout_id of type str"),
        ({"samples": [{}], "rollout_id": True}, "a rollout_id of type bool"),
        ({"samples": [{}], "metadata": [1]}, "metadata of type list"),
    ],
)
def test_archive_of_something_else(value, message, tmp_path):
    with pytest.raises(DumpError, match=f"got: +{message}"):
        read_dump(saved(tmp_path / "x.pt", value))


def test_bad_rows_are_carried(tmp_path):
    with pytest.raises(DumpError) as caught:
        read_dump(saved(tmp_path / "x.pt", {"samples": [{}, 1, {}, None]}))
    assert caught.value.rows == (1, 3)


def test_archive_of_another_layout(tmp_path):
    data = pickle.dumps({"samples": [{"a": "x" * 999}]}, 2)
    path = tmp_path / "x.pt"
    with pytest.raises(DumpError, match=r"compressed members: archive/data\.pkl"):
        read_dump(archive(path, data, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(DumpError, match=r"without data\.pkl, with archive/version"):
        read_dump(archive(path, None))
    with zipfile.ZipFile(archive(path, data), "a") as file:
        file.writestr("other/data.pkl", data)
    with pytest.raises(DumpError, match="members outside one folder"):
        read_dump(path)
    with pytest.raises(DumpError, match="EOFError: the pickle has no end"):
        read_dump(archive(path, data[:-1]))
    with pytest.raises(DumpError, match="fails to load with error: unpack_from requires"):
        read_dump(archive(path, b"\x80\x02X\xff"))
    with pytest.raises(DumpError, match=r"TorchScript|torchscript"):
        read_dump(archive(path, data, {"constants.pkl": data}))


def test_tensor_with_a_shortened_storage(tmp_path):
    whole = saved(tmp_path / "whole.pt", {"samples": [{"t": torch.arange(1000)}]})
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    members["data/0"] = members["data/0"][:64]
    with pytest.raises(DumpError, match="fails to load with RuntimeError"):
        read_dump(archive(tmp_path / "cut.pt", members.pop("data.pkl"), members))


def test_zstd_stream_that_was_cut(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    one, two = (zstandard.compress(json.dumps({"a": number}).encode() + b"\n") for number in (1, 2))
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(one + two)
    assert read_dump(path).samples == [{"a": 1}, {"a": 2}]
    path.write_bytes(one + two[:-3])
    with pytest.raises(DumpError, match="the zstd frame has no end"):
        read_dump(path)


def test_zstd_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "x.jsonl.zst").write_bytes(b"x")
    with pytest.raises(MissingDependencyError, match=r"miles-norm\[zstd\]"):
        read_dump(tmp_path / "x.jsonl.zst")
    with pytest.raises(MissingDependencyError, match=r"miles-norm\[zstd\]"):
        write_dump(RolloutDump([{}]), tmp_path / "y.jsonl.zst")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.jsonl.zst"]


def test_paths_that_are_no_file(tmp_path):
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, message in [
        (tmp_path / "none.pt", "No such file"),
        (tmp_path / "folder.pt", "a folder"),
        (tmp_path / "pipe.jsonl", "no regular file"),
        (tmp_path / "folder.pt" / "x\0.pt", "null (byte|character)"),
    ]:
        with pytest.raises(DumpError, match=message):
            read_dump(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    path = saved(tmp_path / "x.pt", {"samples": [{}]})
    path.chmod(0)
    with pytest.raises(DumpError, match="Permission denied"):
        read_dump(path)


def test_flipped_bytes_give_a_dump_or_one_error(tmp_path):
    # Half of the files keep valid checksums, so that the damage reaches the unpickler.
    chance = random.Random(20)
    source = LORA.read_bytes()
    with zipfile.ZipFile(LORA) as file:
        data = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    refused = 0
    for number in range(40):
        damaged = bytearray(source if number % 2 else data)
        for _ in range(chance.choice([1, 2, 8])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path = tmp_path / "x.pt"
        path.write_bytes(damaged) if number % 2 else archive(path, bytes(damaged))
        try:
            assert len(read_dump(path).samples) == 25
        except DumpError:
            refused += 1
    assert refused > 20
