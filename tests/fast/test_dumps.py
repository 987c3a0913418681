"""Reading and writing rollout dumps: real ones, values of every kind, failed writes."""

import json
import logging
import struct

import numpy as np
import pytest
import torch
from dump_files import FORMATS, LORA, REAL, Colour, Note, plain, saved
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_norm.dumps import RolloutDump, read_dump, write_dump
from miles_norm.errors import DumpError
from miles_norm.samples import AdapterRef, RewardSpec

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
    with pytest.raises(DumpError, match=r"(?s)the file name 'x\.csv'.*name the output with one of these endings"):
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
