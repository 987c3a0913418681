"""Reading and writing rollout dumps: real ones, damaged ones and hostile ones."""

import builtins
import enum
import gzip
import io
import json
import logging
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_norm.dumps import RolloutDump, read_dump, write_dump
from miles_norm.errors import DumpError, MissingDependencyError, UnsafeDumpError
from miles_norm.safe_pickle import pickled_names
from miles_norm.samples import AdapterRef, RewardSpec

HERE = Path(__file__).parent
SESSION = HERE.parents[1] / "examples/data/miles_session_v2.pt"
REAL = [SESSION, *(HERE / "data" / f"{name}.pt" for name in ("miles_mainstream", "miles_multi_lora", "slime_dump"))]
LORA = HERE / "data/miles_multi_lora.pt"
FORMATS = [".pt", ".jsonl", ".jsonl.gz", ".jsonl.zst"]


def plain(value):
    """References as dicts, everything else as it is."""
    if isinstance(value, AdapterRef | RewardSpec):
        return value.__getstate__()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def archive(path, data_pkl, members=None, compression=zipfile.ZIP_STORED):
    """A torch.save archive around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in {"data.pkl": data_pkl, "version": b"3\n", "byteorder": b"little", **(members or {})}.items():
            if data is not None:
                file.writestr(f"archive/{name}", data)
    return path


def saved(path, value):
    torch.save(value, path)
    return path


class Hostile:
    """Unpickling this makes a folder."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Note:
    text: str
    colour: Colour


# Real dumps.


@pytest.mark.parametrize(
    ("path", "rows", "rollout_id", "none_ids"),
    [(REAL[0], 58, 0, 9), (REAL[1], 58, 0, 9), (REAL[2], 25, 2, 5), (REAL[3], 58, 1, 9)],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_real_dump(path, rows, rollout_id, none_ids):
    dump = read_dump(path)
    assert len(dump.samples) == rows
    assert dump.rollout_id == rollout_id
    assert sum(row["rollout_id"] is None for row in dump.samples) == none_ids
    assert all(type(token) is int for row in dump.samples for token in row["tokens"])


def test_real_dump_with_pickled_references():
    dump = read_dump(LORA)
    assert dump.metadata["prompt_group_sizes"] == [8, 6, 5, 6]
    assert dump.samples[0]["adapter"] == AdapterRef("math-lora", 0)
    assert dump.samples[0]["reward_spec"] == RewardSpec(None, None)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_dump_round_trips(path, suffix, tmp_path):
    dump = read_dump(path)
    write_dump(dump, tmp_path / f"copy{suffix}")
    copy = read_dump(tmp_path / f"copy{suffix}")
    # Through JSON text, so that 0 and 0.0, None and missing, and the order of keys count.
    assert json.dumps(copy.samples) == json.dumps(plain(dump.samples))
    if suffix == ".pt":
        assert (copy.rollout_id, copy.metadata) == (dump.rollout_id, dump.metadata)
    else:
        assert (copy.rollout_id, copy.metadata) == (None, {})
    assert [entry.name for entry in tmp_path.iterdir()] == [f"copy{suffix}"]


def test_written_pt_loads_without_this_library(tmp_path):
    write_dump(read_dump(LORA), tmp_path / "copy.pt")
    loaded = torch.load(tmp_path / "copy.pt", weights_only=True)
    assert loaded["samples"][0]["adapter"] == {"name": "math-lora", "slot": 0}


# Values.

VALUES = {
    "t": torch.arange(6).reshape(2, 3),
    "bf16": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
    "a": np.arange(6, dtype=">i4").reshape(2, 3),
    "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "empty": np.zeros((0, 2), np.uint8),
    "words": np.array(["a", "bcd"]),
    "number": np.float32(0.1),
    "flag": np.bool_(True),
    "unknown": {"deep": [(np.int64(3), torch.ones(1))]},
    "id": 0,
    "none": None,
    "nan": float("nan"),
}


def test_pt_keeps_tensors_and_arrays(tmp_path):
    for path in (tmp_path / "ours.pt", tmp_path / "torch.pt"):
        if path.stem == "ours":
            write_dump(RolloutDump([VALUES]), path)
        else:
            torch.save({"samples": [VALUES]}, path)
        row = read_dump(path).samples[0]
        assert list(row) == list(VALUES)
        for key in ("t", "bf16"):
            assert row[key].dtype == VALUES[key].dtype
            assert torch.equal(row[key], VALUES[key])
        for key in ("a", "f", "empty", "words", "number", "flag"):
            assert type(row[key]) is type(VALUES[key])
            np.testing.assert_array_equal(row[key], VALUES[key], strict=True)
        assert row["unknown"]["deep"][0] == (3, torch.ones(1))
        assert row["f"].flags.f_contiguous
        assert row["a"].flags.writeable
        assert (row["id"], row["none"]) == (0, None)


def test_pt_writes_a_view_without_its_storage(tmp_path):
    write_dump(RolloutDump([{"t": torch.zeros(1 << 20)[5:7]}]), tmp_path / "view.pt")
    assert (tmp_path / "view.pt").stat().st_size < 10_000
    assert read_dump(tmp_path / "view.pt").samples[0]["t"].shape == (2,)


def test_jsonl_turns_values_into_lists_and_numbers(tmp_path):
    row = {**VALUES, "note": Note("n", Colour.RED), "adapter": AdapterRef("a", 1), "status": Colour.RED}
    write_dump(RolloutDump([row]), tmp_path / "rows.jsonl")
    text = (tmp_path / "rows.jsonl").read_text()
    assert '"nan":NaN' in text
    read = read_dump(tmp_path / "rows.jsonl").samples[0]
    assert read["t"] == read["a"] == [[0, 1, 2], [3, 4, 5]]
    assert read["bf16"] == [0.5, -2.0]
    assert read["number"] == pytest.approx(0.1)
    assert read["flag"] is True
    assert read["unknown"] == {"deep": [[3, [1.0]]]}
    assert read["note"] == {"text": "n", "colour": "red"}
    assert read["adapter"] == {"name": "a", "slot": 1}
    assert read["status"] == "red"


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        ),
        max_size=4,
    )
)
def test_any_plain_row_survives_every_format(tmp_path_factory, row):
    folder = tmp_path_factory.getbasetemp()
    for suffix in FORMATS:
        write_dump(RolloutDump([row, row]), folder / f"any{suffix}")
        assert repr(read_dump(folder / f"any{suffix}").samples) == repr([row, row])


def test_jsonl_names_metadata_that_is_not_written(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "miles_norm"):
        write_dump(RolloutDump([{"a": 1}], 3, {"prompt_group_sizes": [1]}), tmp_path / "rows.jsonl")
    assert "not written: 'prompt_group_sizes'" in caplog.text


def test_old_and_foreign_dumps_lack_keys(tmp_path, caplog):
    dump = read_dump(saved(tmp_path / "old.pt", {"samples": [{"a": 1}], "step": 4}))
    assert dump == RolloutDump([{"a": 1}], None, {})
    assert "the keys 'step' are not read" in caplog.text


@pytest.mark.parametrize("suffix", FORMATS)
def test_progress_runs_from_start_to_end(suffix, tmp_path):
    rows = [{"text": "x" * 500}] * 300
    written, read = [], []
    write_dump(RolloutDump(rows), tmp_path / f"r{suffix}", progress=lambda *step: written.append(step))
    read_dump(tmp_path / f"r{suffix}", progress=lambda *step: read.append(step))
    size = (tmp_path / f"r{suffix}").stat().st_size
    assert written == [(n, 300) for n in range(1, 301)]
    assert read[0] == (0, size)
    assert read[-1] == (size, size)
    assert read == sorted(read)


# Hostile pickles.


def short_text(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def stack_global(module, name, argument):
    """Protocol 4: the two names come out of the memo, in the wrong order, and the call sits deep inside the rows."""
    names = short_text(name) + b"\x940" + short_text(module) + b"\x940"
    call = b"h\x01h\x00\x93(" + short_text(argument) + b"tR"
    return b"\x80\x04" + names + b"}" + short_text("samples") + b"](" + call + b"es."


def hostile_pickles(marker):
    make = Hostile(os.mkdir, marker)
    nested = {"samples": [{"metadata": {"a": [({"deep": make},)]}}]}
    through_getattr = Hostile(builtins.getattr, os, "mkdir")
    eval_text = f"__import__('os').mkdir({marker!r})"
    return {
        "reduce": (pickle.dumps({"samples": [make]}, 2), "posix.mkdir|nt.mkdir"),
        "nested": (pickle.dumps(nested, 2), "posix.mkdir|nt.mkdir"),
        "protocol 4": (pickle.dumps(nested, 4), "posix.mkdir|nt.mkdir"),
        "memo": (stack_global("os", "mkdir", marker), r"os\.mkdir"),
        "eval": (pickle.dumps({"samples": [Hostile(eval, eval_text)]}, 2), r"builtins\.eval"),
        "two": (pickle.dumps([make, Hostile(eval, eval_text)], 2), r"builtins\.eval, posix\.mkdir"),
        "allowed class in front": (pickle.dumps([{1}, make], 2), "posix.mkdir"),
        "enum": (
            b"\x80\x02}X\x07\x00\x00\x00samples](c__builtin__\ngetattr\nc" + __name__.encode() + b"\nColour\n"
            b"X\x03\x00\x00\x00RED\x86Res.",
            rf"builtins\.getattr, {__name__}\.Colour",
        ),
        "inst": (b"(S'" + marker.encode() + b"'\nios\nmkdir\n.", r"os\.mkdir"),
        "extension": (b"\x80\x02\x82\x01.", "copyreg extension 1"),
        "unknown module": (pickle.dumps(through_getattr.call, 2), r"builtins\.getattr"),
        "torch subclass": (
            b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n.",
            r"torch\._tensor\._rebuild_from_type_v2",
        ),
    }


@pytest.mark.parametrize("kind", hostile_pickles(""))
def test_hostile_pickle_is_refused_by_name_and_not_run(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "ran"
    data, names = hostile_pickles(str(marker))[kind]
    with pytest.raises(UnsafeDumpError, match=rf"got: +a pickle that names ({names})\n"):
        read_dump(archive(tmp_path / "hostile.pt", data))
    assert not marker.exists()


def test_hostile_pickles_would_run_if_loaded(tmp_path):
    # The archives above are real attacks: torch runs the same files when it is told to.
    for number, kind in enumerate(["reduce", "nested", "protocol 4", "memo", "eval", "inst"]):
        marker = tmp_path / f"ran{number}"
        path = archive(tmp_path / "hostile.pt", hostile_pickles(str(marker))[kind][0])
        torch.load(path, weights_only=False)
        assert marker.is_dir()


def test_hostile_pickle_in_a_fresh_process(tmp_path):
    marker = tmp_path / "ran"
    paths = [
        str(archive(tmp_path / f"{n}.pt", data)) for n, (data, _) in enumerate(hostile_pickles(str(marker)).values())
    ]
    code = (
        "import sys\n"
        "from miles_norm.dumps import read_dump\n"
        "from miles_norm.errors import UnsafeDumpError\n"
        "refused = 0\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        read_dump(path)\n"
        "    except UnsafeDumpError:\n"
        "        refused += 1\n"
        "print(refused)\n"
    )
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    root = HERE.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True, env=environment, cwd=root
    )
    assert done.stdout == f"{len(paths)}\n"
    assert not marker.exists()


def test_allow_lists_of_the_process_open_nothing(tmp_path):
    marker = tmp_path / "ran"
    path = archive(
        tmp_path / "hostile.pt", pickle.dumps({"samples": [Hostile(eval, f"open({str(marker)!r}, 'w')")]}, 2)
    )
    arrays = saved(tmp_path / "arrays.pt", {"samples": [{"a": np.arange(3, dtype=">i2")}]})
    reconstruct = np.zeros(1).__reduce__()[0]
    with torch.serialization.safe_globals([eval, (eval, "builtins.eval"), reconstruct, np.ndarray, np.dtype]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(UnsafeDumpError, match=r"builtins\.eval"):
            read_dump(path)
        np.testing.assert_array_equal(read_dump(arrays).samples[0]["a"], [0, 1, 2])
        assert set(torch.serialization.get_safe_globals()) == before
    assert not marker.exists()


@pytest.mark.parametrize("data", [d for d, _ in hostile_pickles("").values()], ids=list(hostile_pickles("")))
def test_second_wall_stands_alone(data, tmp_path, monkeypatch):
    # Without the first wall the file must still not load: torch's own check refuses it.
    monkeypatch.setattr("miles_norm.safe_pickle._check_names", lambda data, subject: {"numpy.dtype"})
    with pytest.raises(DumpError):
        read_dump(archive(tmp_path / "hostile.pt", data))


def pickled_array(code):
    """Four bytes as an array of shape (4,) of the dtype, as numpy pickles it."""
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00" + code + b"\x89\x88\x87R"
    state = b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return (
        b"\x80\x02}X\x07\x00\x00\x00samples]}X\x01\x00\x00\x00acnumpy._core.multiarray\n_reconstruct\n"
        b"cnumpy\nndarray\nK\x00\x85X\x01\x00\x00\x00b\x87R(K\x01K\x04\x85" + dtype + state + b"\x89"
        b"c_codecs\nencode\nX\x04\x00\x00\x00abcdX\x06\x00\x00\x00latin1\x86Rtbsas."
    )


def test_crafted_numpy_states_are_refused(tmp_path):
    good = read_dump(archive(tmp_path / "good.pt", pickled_array(b"u1")))
    np.testing.assert_array_equal(good.samples[0]["a"], np.frombuffer(b"abcd", np.uint8))
    for code, message in [(b"u8", "does not fill its shape"), (b"O8", "dtype 'O8'"), (b"V1", "dtype 'V1'")]:
        with pytest.raises(DumpError, match=message) as caught:
            read_dump(archive(tmp_path / "bad.pt", pickled_array(code)))
        # torch's own message tells how to turn its check off.
        assert "weights_only" not in str(caught.value)


@given(st.recursive(st.integers() | st.floats() | st.text() | st.sets(st.integers()) | st.complex_numbers(), st.lists))
def test_names_are_those_that_torch_sees(value):
    data = pickle.dumps(value, protocol=2)
    seen = torch._weights_only_unpickler.get_globals_in_pkl(io.BytesIO(data))
    assert pickled_names(data) == seen


# Damaged files.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"{}", "the file name 'x.json'"),
        ("x.parquet", b"PAR1", "the file name 'x.parquet'"),
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
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:-9], "breaks off or is damaged after 9"),
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
    with pytest.raises(MissingDependencyError, match=r"miles_norm\[zstd\]"):
        read_dump(tmp_path / "x.jsonl.zst")
    with pytest.raises(MissingDependencyError, match=r"miles_norm\[zstd\]"):
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


# Writing.


@pytest.mark.parametrize("suffix", FORMATS)
def test_failed_write_leaves_the_old_file_and_nothing_else(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    write_dump(RolloutDump([{"a": 1}]), path)
    before = path.read_bytes()
    rows = [{"a": 1}, {"b": {"c": [object()]}}, {}, {"d": lambda: 0}]
    with pytest.raises(DumpError, match=r"row 1, key 'b\.c\[0\]': a value of type object; also row 3") as caught:
        write_dump(RolloutDump(rows), path)
    assert caught.value.rows == (1, 3)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"x", "bytes"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (torch.ones(2, dtype=torch.complex64), "complex"),
        ({1: 2}, "a key of type int"),
    ],
)
def test_values_without_a_json_form(value, what, tmp_path):
    with pytest.raises(DumpError, match=f"row 0, key 'k.*{what}"):
        write_dump(RolloutDump([{"k": value}]), tmp_path / "x.jsonl")
    write_dump(RolloutDump([{"k": value}]), tmp_path / "x.pt")
    assert repr(read_dump(tmp_path / "x.pt").samples[0]["k"]) == repr(value)


def test_integer_too_long_for_json(tmp_path):
    with pytest.raises(DumpError, match="row 0, key 'k': Exceeds the limit"):
        write_dump(RolloutDump([{"j": 1, "k": 10**5000}]), tmp_path / "x.jsonl")


@pytest.mark.parametrize("suffix", [".pt", ".jsonl"])
def test_value_inside_itself(suffix, tmp_path):
    loop = [1, "a", []]
    loop[2].append(loop)
    with pytest.raises(DumpError, match="row 0, key 'k': nested too deeply, or inside itself"):
        write_dump(RolloutDump([{"k": loop}]), tmp_path / f"x{suffix}")


@pytest.mark.parametrize("value", [np.array([object()]), torch.ones(2).to_sparse(), torch.ones(2, device="meta")])
def test_arrays_that_a_pt_cannot_hold(value, tmp_path):
    with pytest.raises(DumpError, match=r"row 0, key 'k': (an array of dtype object|a tensor that is sparse)"):
        write_dump(RolloutDump([{"k": value}]), tmp_path / "x.pt")


def test_dumps_that_are_not_written(tmp_path):
    with pytest.raises(DumpError, match="No such file or directory"):
        write_dump(RolloutDump([{}]), tmp_path / "none" / "x.pt")
    with pytest.raises(DumpError, match="a dump without rows"):
        write_dump(RolloutDump([]), tmp_path / "x.pt")
    with pytest.raises(DumpError, match="row 1; row 1 is of type int"):
        write_dump(RolloutDump([{}, 1]), tmp_path / "x.jsonl")
    with pytest.raises(DumpError, match="metadata, key 'm': a value of type object"):
        write_dump(RolloutDump([{}], metadata={"m": object()}), tmp_path / "x.pt")
    with pytest.raises(DumpError, match=r"the file name 'x\.csv'"):
        write_dump(RolloutDump([{}]), tmp_path / "x.csv")
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_nothing(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dump(RolloutDump([{}]), tmp_path / "x.jsonl.gz", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_same_rows_give_the_same_gzip(tmp_path):
    for name in ("a", "b"):
        write_dump(RolloutDump([{"a": 1}]), tmp_path / f"{name}.jsonl.gz")
    first, second = ((tmp_path / f"{name}.jsonl.gz").read_bytes() for name in ("a", "b"))
    assert first == second
    assert struct.unpack_from("<I", first, 4) == (0,)
