"""Pickles that ask for code to be run are refused by name, and nothing of them runs."""

import builtins
import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from dump_files import HERE, Hostile, archive, saved
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.dumps import read_dump
from miles_norm.errors import DumpError, UnsafeDumpError
from miles_norm.storage.safe_pickle import pickled_names


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
    monkeypatch.setattr("miles_norm.storage.safe_pickle._check_names", lambda data, subject: {"numpy.dtype"})
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
