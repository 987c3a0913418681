"""Ragged columns: both backings say the same, nothing is copied that need not be, bad rows are named."""

import array
import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.errors import SampleError
from miles_norm.train_data.ragged import Ragged

INTS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.lists(INTS, max_size=5), max_size=6)
FLOATS = st.lists(st.lists(st.floats(), max_size=5), max_size=6)


def flat(rows, dtype=torch.int64):
    """The same rows, backed by one tensor."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return Ragged(torch.tensor([value for row in rows for value in row], dtype=dtype), offsets)


def bits(rows):
    return [array.array("d", row).tobytes() for row in rows]


def backings(rows):
    arrays = [np.array(row, np.int64) for row in rows]
    yield Ragged.from_rows(rows, torch.int64)
    yield Ragged.from_rows([tuple(row) for row in rows], torch.int64)
    yield Ragged.from_rows(arrays, torch.int64)
    yield Ragged.from_rows([torch.from_numpy(row) for row in arrays], torch.int64)
    yield Ragged.from_rows([row if n % 2 else array for n, (row, array) in enumerate(zip(rows, arrays, strict=True))],
                           torch.int64)  # fmt: skip
    yield flat(rows)
    joined = np.concatenate([np.empty(3, np.int64), *arrays])[3:]
    bounds = np.cumsum([0, *map(len, rows)])
    yield Ragged.from_rows([joined[a:b] for a, b in itertools.pairwise(bounds)], torch.int64)


@given(ROWS)
def test_all_backings_hold_the_same_rows(rows):
    for column in backings(rows):
        assert len(column) == len(rows)
        assert column.lengths.tolist() == [len(row) for row in rows]
        assert column.tolists() == rows
        assert [[int(value) for value in row] for row in column] == rows
        assert column.values.tolist() == [value for row in rows for value in row]
        assert column.values.dtype == column.dtype == torch.int64
        assert [row.tolist() for row in column.arrays()] == rows


@given(FLOATS)
def test_floats_keep_their_bits(rows):
    column = Ragged.from_rows(rows, torch.float64)
    assert bits(flat(rows, torch.float64).tolists()) == bits(rows)
    assert bits(Ragged(column.values, column.offsets).tolists()) == bits(rows)


@given(ROWS, st.data())
def test_select_takes_rows_in_any_order(rows, data):
    numbers = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 7), st.integers(0, 7))))
    mask = torch.tensor([n % 3 != 0 for n in range(len(rows))], dtype=torch.bool)
    for column in backings(rows):
        for chosen in (numbers, np.array(numbers, np.int64), torch.tensor(numbers, dtype=torch.int64)):
            part = column.select(chosen)
            assert part.tolists() == [rows[n] for n in numbers]
            assert part.is_flat == column.is_flat
            assert part.values.tolist() == [value for n in numbers for value in rows[n]]
        assert column.select(slice(start, stop)).tolists() == rows[start:stop]
        assert column.select(slice(start, stop)).offsets[0] == 0
        assert column.select(slice(None, None, -1)).tolists() == rows[::-1]
        assert column.select(mask).tolists() == [row for n, row in enumerate(rows) if n % 3]


@given(ROWS, ROWS, ROWS)
def test_concat_joins_rows(one, two, three):
    for first, second in zip(backings(one), backings(two), strict=True):
        for third in backings(three):
            joined = Ragged.concat([first, second, third])
            assert joined.tolists() == one + two + three
            assert joined.values.tolist() == [value for row in one + two + three for value in row]
    lists = Ragged.concat([Ragged.from_rows(rows, torch.int64) for rows in (one, two)])
    assert not lists.is_flat


@given(ROWS, st.integers(0, 3), st.integers(-5, 5))
def test_padding_and_back(rows, more, fill):
    width = max(map(len, rows), default=0) + more
    for column in backings(rows):
        padded = column.padded(width, fill)
        # The oracle pads one list after the other.
        assert padded.tolist() == [row + [fill] * (width - len(row)) for row in rows]
        assert Ragged.from_padded(padded, column.lengths).tolists() == rows
        mask = torch.arange(width) < column.lengths[:, None]
        assert Ragged.from_padded(padded, mask).tolists() == rows


def test_long_rows_are_selected_one_by_one():
    rows = [list(range(n, n + 300)) for n in range(4)]
    assert flat(rows).select([3, 0, 3]).tolists() == [rows[3], rows[0], rows[3]]


def test_from_padded_takes_what_a_mask_with_holes_marks():
    # Row 0: positions 0 and 2; row 1: position 1.
    tensor, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert Ragged.from_padded(tensor, mask).tolists() == [[1, 3], [5]]


def test_trailing_dimensions():
    # Routed experts: 2 layers, 3 experts each.
    rows = [np.arange(12, dtype=np.int32).reshape(2, 2, 3), np.arange(6, dtype=np.int32).reshape(1, 2, 3)]
    for column in (
        Ragged.from_rows(rows, torch.int64),
        Ragged.from_rows([row.tolist() for row in rows], torch.int32),
        Ragged(np.concatenate(rows), [0, 2, 3]),
    ):
        assert column.row_shape == (2, 3)
        assert column.dtype == torch.int32
        assert column.values.shape == (3, 2, 3)
        assert column.tolists() == [row.tolist() for row in rows]
        assert column.select([1, 0]).values.tolist() == [*rows[1].tolist(), *rows[0].tolist()]
        assert column.padded().shape == (2, 2, 2, 3)
        assert column.padded()[1].tolist() == [*rows[1].tolist(), [[0, 0, 0], [0, 0, 0]]]
    empty = Ragged.from_rows([[], []], torch.int32)
    joined = Ragged.concat([empty, Ragged.from_rows(rows, torch.int32), Ragged(torch.empty(0, 9), [0])])
    assert joined.tolists() == [[], [], *[row.tolist() for row in rows]]


def test_lists_stay_what_they_are():
    rows = [[1, 2], [3]]
    column = Ragged.from_rows(rows, torch.int64)
    assert column[0] is rows[0]
    assert column.tolists()[1] is rows[1]
    assert column.select([1])[0] is rows[1]
    assert column.values is column.values
    assert column.to("cpu") is column
    assert repr(column) == "Ragged(2 rows, 3 entries, int64, lists)"


def test_flat_rows_are_views():
    values = torch.arange(6)
    column = Ragged(values, torch.tensor([0, 2, 6], dtype=torch.int32))
    values[2] = 9
    assert column[1].tolist() == [9, 3, 4, 5]
    assert column[-2].data_ptr() == values.data_ptr()
    assert column.select(slice(1, 2)).values.data_ptr() == values[2:].data_ptr()
    assert repr(column) == "Ragged(2 rows, 6 entries, int64, flat)"


@pytest.mark.parametrize("kind", ["array", "read-only", "tensor", "two dimensions"])
def test_slices_of_one_array_are_wrapped_without_copying(kind):
    whole = np.arange(1200, dtype=np.int32).reshape(-1, 2) if kind == "two dimensions" else np.arange(600)
    whole.flags.writeable = kind != "read-only"
    source = torch.from_numpy(whole) if kind == "tensor" else whole
    column = Ragged.from_rows([source[10:200], source[200:200], source[200:450]], torch.int64)
    assert column.is_flat
    assert column.values.data_ptr() == whole[10:].__array_interface__["data"][0]
    assert column.offsets.tolist() == [0, 190, 190, 440]
    assert column.values.tolist() == whole[10:450].tolist()


def test_arrays_that_are_not_side_by_side_stay_apart():
    whole, tensor = np.arange(10), torch.arange(10)
    for rows in (
        [whole[:3], whole[4:]],
        [whole[5:], whole[:5]],
        [whole[::2], whole[1::2]],
        [whole[:5], np.arange(5)],
        [np.arange(5), np.arange(3)],
        [tensor[:3], tensor[4:]],
        [tensor[:5], torch.arange(5)],
        [tensor[::2], tensor[1::2]],
    ):
        column = Ragged.from_rows(rows, torch.int64)
        assert not column.is_flat
        assert column[0] is rows[0]
        assert column.values.tolist() == [*rows[0].tolist(), *rows[1].tolist()]


def test_wrapping_arrays_takes_no_memory_for_tokens():
    rows = [np.zeros(8000, np.int64) for _ in range(100)]
    tracemalloc.start()
    column = Ragged.from_rows(rows, torch.int64)
    assert column.lengths.sum() == 800_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.01 * 100 * 8000 * 8


def test_arrays_of_other_dtypes():
    half = Ragged(torch.tensor([1.5, 2.0], dtype=torch.bfloat16), [0, 1, 2])
    assert half.tolists() == [[1.5], [2.0]]
    assert half.arrays()[0].dtype == np.float32
    assert Ragged.from_rows([np.array([1, 2], ">i4"), np.array([3], ">i4")], torch.int64).values.tolist() == [1, 2, 3]
    assert Ragged.from_rows([np.arange(4)[::-1]], torch.int64).values.tolist() == [3, 2, 1, 0]
    # Rows of two dtypes become what was declared.
    mixed = Ragged.from_rows([np.array([1], np.int8), np.array([2], np.int64)], torch.int16)
    assert (mixed.dtype, mixed.values.tolist()) == (torch.int16, [1, 2])
    assert Ragged.from_rows([[1, 0], [True]], torch.bool).values.tolist() == [True, False, True]
    assert Ragged.from_rows([b"\1\0", bytearray(b"\1")], torch.uint8).tolists()[0] == [1, 0]
    assert Ragged.from_rows([[0.5]], torch.bfloat16).values.dtype == torch.bfloat16
    assert Ragged.from_rows([[1.0, 0.0]], torch.int64).values.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "dtype", "bad", "text"),
    [
        ([[1], [0.5], [2], [None]], torch.int64, (1, 3), "the value 0.5"),
        ([[1], [256], [-1]], torch.uint8, (1, 2), "the value 256"),
        ([[1], [2**63]], torch.int64, (1,), "an integer beyond int64"),
        ([[1], [2]], torch.bool, (1,), "the value 2"),
        ([["a"], [1.0]], torch.float64, (0,), "a row of dtype <U1"),
        ([[1.0], [float("nan")]], torch.int64, (1,), "the value nan"),
        ([[[1, 2]], [[3]], [[4, 5]]], torch.int64, (1,), r"entries of shape \[1\] beside \[2\]"),
        ([[1, [2]], [3]], torch.int64, (0,), "inhomogeneous"),
    ],
)
def test_elements_that_do_not_fit(rows, dtype, bad, text):
    with pytest.raises(SampleError, match=text) as caught:
        _ = Ragged.from_rows(rows, dtype).values
    assert caught.value.rows == bad


@pytest.mark.parametrize("rows", [[[1], None, 3], [[1], "ab", np.array(3)], [[1], {}, torch.ones(2, 0)]])
def test_rows_of_another_kind(rows):
    with pytest.raises(SampleError, match="rows 1, 2 of a ragged column") as caught:
        Ragged.from_rows(rows, torch.int64)
    assert caught.value.rows == (1, 2)


def test_columns_that_are_refused():
    for offsets, text in [
        ([0, 2], "0 to 2"),
        ([1, 3], "1 to 3"),
        ([0, 2, 1, 3], "an end before the beginning in row 1"),
        ([], "shape"),
        ([[0, 3]], "shape"),
        ([0.0, 3.0], "dtype"),
    ]:
        with pytest.raises(SampleError, match=text):
            Ragged(torch.arange(3), offsets)
    for values in ([1, 2, 3], torch.tensor(3), torch.ones(3, 0), np.array(["a"])):
        with pytest.raises(SampleError, match="values of a ragged column"):
            Ragged(values, [0, 3])
    with pytest.raises(SampleError, match="dtype complex256"):
        Ragged.from_rows([[1], np.ones(2, np.clongdouble)], torch.int64)
    with pytest.raises(SampleError, match=r"float32 rows of shape .*int64"):
        Ragged.concat([flat([[1]]), flat([[1]], torch.float32)])
    with pytest.raises(SampleError, match="no parts"):
        Ragged.concat([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16])
@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("width", [(), (2,)])
def test_long_and_short_rows_of_any_dtype_are_selected(dtype, length, width):
    """Long rows are copied one by one, short ones by an index; some dtypes numpy lacks."""
    values = torch.arange(4 * length).reshape(-1, *[1] * len(width)).expand(-1, *width).to(torch.float32).to(dtype)
    column = Ragged(values.contiguous(), [0, length, length, 3 * length, 4 * length])
    found = column.select([2, 1, 0, 2])
    expected = [values[length : 3 * length], values[:0], values[:length], values[length : 3 * length]]
    assert found.values.dtype == dtype
    assert [len(row) for row in found] == [2 * length, 0, length, 2 * length]
    assert torch.equal(found.values.float(), torch.cat(expected).float())


def test_selections_and_paddings_that_are_refused():
    column = flat([[1], [2, 3], [4, 5, 6]])
    with pytest.raises(SampleError, match=r"got: +rows -1, 3") as caught:
        column.select([0, -1, 3])
    assert caught.value.rows == (-1, 3)
    for rows in ([0.5], [[0]], torch.tensor([True]), "ab"):
        with pytest.raises(SampleError, match="selected rows"):
            column.select(rows)
    with pytest.raises(SampleError, match="length of rows 1, 2") as caught:
        column.padded(1)
    assert caught.value.rows == (1, 2)
    with pytest.raises(SampleError, match="length of rows 0, 2") as caught:
        Ragged.from_padded(torch.ones(3, 2), torch.tensor([-1, 2, 3]))
    assert caught.value.rows == (0, 2)
    with pytest.raises(SampleError, match=r"with a mask or lengths of shape \[2\]"):
        Ragged.from_padded(torch.ones(3, 2), torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="row 3 of a ragged column with 3 rows"):
        column[3]


@pytest.mark.gpu
def test_on_a_gpu():
    rows = [[1, 2], [], [3, 4, 5]]
    column = flat(rows).to("cuda")
    assert column.device.type == "cuda"
    assert column.tolists() == rows
    assert column.select([2, 0]).tolists() == [rows[2], rows[0]]
    assert Ragged.from_padded(column.padded(), column.lengths).tolists() == rows
    assert Ragged.from_rows(rows, torch.int64).to("cuda").values.device.type == "cuda"


def test_rows_without_an_entry_in_every_place_are_refused() -> None:
    sparse, nested = torch.ones(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    with pytest.raises(SampleError, match="rows 0, 2 of a ragged column") as error:
        Ragged.from_rows([sparse, torch.ones(2), nested], torch.float32)
    assert error.value.rows == (0, 2)
