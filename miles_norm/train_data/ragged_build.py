"""From N lists, arrays or tensors to one flat tensor: without a copy where they lie side by side, else the fast way."""

from __future__ import annotations

import array
import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows

__all__ = [
    "adjacent_rows",
    "as_array",
    "as_tensor",
    "flat_values",
    "from_numpy",
    "host_array",
    "joined_rows",
    "list_dtype",
]

# array.array checks every element while it copies: a float in an integer column or an overflow raises, where numpy
# would truncate. It is as fast as np.fromiter and ten times as fast as torch.tensor.
_TYPECODES = {
    torch.int64: "q", torch.int32: "i", torch.int16: "h", torch.int8: "b", torch.uint8: "B", torch.bool: "B",
    torch.float64: "d", torch.float32: "f",
}  # fmt: skip
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


def from_numpy(values: np.ndarray[Any, Any]) -> Tensor:
    """A tensor on the same memory; arrays of foreign byte order or with negative strides are copied.

    Read-only memory, as shared object stores hand it out, is taken too: writing to such a tensor is an error of the
    caller.

    Raises:
        TypeError: a dtype that torch lacks.
    """
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if any(stride < 0 for stride in values.strides):
        values = values.copy()
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(values)


def host_array(values: Tensor) -> np.ndarray[Any, Any]:
    """A numpy view of a tensor (a copy if it is on another device); float32 where numpy lacks the dtype."""
    values = values.detach().cpu()
    try:
        return values.numpy()
    except TypeError:
        return values.to(torch.float32).numpy()


def as_array(values: Tensor) -> tuple[np.ndarray[Any, Any], torch.dtype | None]:
    """A tensor as a numpy array on the CPU; one of a dtype that numpy lacks as its bytes, with the dtype."""
    values = values.detach().cpu()
    try:
        return values.numpy(), None
    except TypeError:
        return values.contiguous().unsqueeze(-1).view(torch.uint8).numpy(), values.dtype


def as_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> Tensor:
    """What ``as_array`` was given, on the memory of the array."""
    tensor = from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype).squeeze(-1)


def joined_rows(values: Tensor, bounds: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Some rows of a flat tensor on the CPU, one after the other; there is at least one.

    Through numpy, whose slices cost a tenth of torch's.
    """
    array, dtype = as_array(values)
    return as_tensor(np.concatenate([array[bounds[n] : bounds[n + 1]] for n in rows]), dtype)


def list_dtype(rows: Sequence[Any], declared: torch.dtype) -> torch.dtype:
    """The dtype that all rows share if they are arrays or tensors, else the declared one.

    Raises:
        SampleError: arrays of a dtype that torch lacks; all rows are named.
    """
    if set(map(type, rows)) <= {list, tuple, bytes, bytearray}:
        return declared
    try:
        found = set(map(_DTYPE, rows))
    except AttributeError:
        found = {getattr(row, "dtype", None) for row in rows}
    known: set[torch.dtype | None] = set()
    for dtype in found:
        if dtype is None or isinstance(dtype, torch.dtype):
            known.add(dtype)
            continue
        try:
            known.add(from_numpy(np.empty(0, dtype)).dtype)
        except TypeError:
            bad = [n for n, row in enumerate(rows) if getattr(row, "dtype", None) == dtype]
            raise _bad_rows(bad, f"an array of dtype {dtype}", declared) from None
    only = known.pop() if len(known) == 1 else None
    return declared if only is None else only


_DTYPE = attrgetter("dtype")


def adjacent_rows(rows: Sequence[Any]) -> Tensor | None:
    """One tensor over the memory of all rows if they lie one after the other in one array or tensor, else None."""
    kinds = set(map(type, rows))
    if len(kinds) != 1 or not issubclass(kind := kinds.pop(), np.ndarray | Tensor):
        return None
    first = rows[0]
    if len(set(map(_DTYPE, rows))) > 1:
        return None
    if first.ndim > 1 and any(row.shape[1:] != first.shape[1:] for row in rows):
        return None
    if issubclass(kind, Tensor):
        return _adjacent_tensors([row.detach() for row in rows])
    try:
        if len(rows) == 1:
            return from_numpy(first)
        return _adjacent_arrays(rows)
    except TypeError:
        return None


def _adjacent_tensors(rows: list[Tensor]) -> Tensor | None:
    first = rows[0]
    if len(rows) == 1:
        return first
    if first.layout != torch.strided or not all(row.is_contiguous() for row in rows):
        return None
    filled = [row for row in rows if row.numel()]
    if not filled:
        return first
    # Equal addresses alone could be two storages that happen to touch.
    if len({row.untyped_storage().data_ptr() for row in filled}) > 1:
        return None
    position = filled[0].storage_offset()
    for row in filled:
        if row.storage_offset() != position:
            return None
        position += row.numel()
    size = (sum(map(len, filled)), *first.shape[1:])
    return filled[0].as_strided(size, torch.empty(size, device="meta").stride())


def _adjacent_arrays(rows: Sequence[np.ndarray[Any, Any]]) -> Tensor | None:
    filled = [row for row in rows if row.size]
    if not filled:
        return from_numpy(rows[0])
    base = filled[0].base
    if not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
        return None
    start = position = filled[0].__array_interface__["data"][0]
    for row in filled:
        if row.base is not base or not row.flags.c_contiguous or row.__array_interface__["data"][0] != position:
            return None
        position += row.nbytes
    whole = np.ndarray(
        (sum(map(len, filled)), *filled[0].shape[1:]),
        filled[0].dtype,
        base.reshape(-1).view(np.uint8),
        offset=start - base.__array_interface__["data"][0],
    )
    return from_numpy(whole)


def flat_values(rows: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The rows as one tensor of the dtype.

    Integers must fit exactly; real numbers are rounded to the dtype.

    Raises:
        SampleError: rows with elements that do not fit, or of another shape than the rest; all of them are named.
    """
    if not rows:
        return torch.empty(0, dtype=dtype)
    kinds = set(map(type, rows))
    if kinds <= {list, tuple, bytes, bytearray} and dtype in _TYPECODES:
        flat = _flat_lists(rows, dtype)
        if flat is not None:
            return flat
    if kinds == {np.ndarray} and len({(row.dtype, row.shape[1:]) for row in rows}) == 1:
        return _exact(from_numpy(np.concatenate(rows)), dtype)
    return _joined(rows, dtype)


def _flat_lists(rows: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    """None if some element does not fit; which one is found by the slower route."""
    code = _TYPECODES[dtype]
    flat = array.array(code)
    try:
        if code == "B":
            flat.frombytes(b"".join(map(bytes, rows)))
        elif dtype in _INTEGERS:
            for row in rows:
                flat.fromlist(row if type(row) is list else list(row))
        else:
            # fromlist grows its buffer bit by bit when it is given floats.
            for row in rows:
                flat.extend(array.array(code, row))
    except (TypeError, ValueError, OverflowError):
        return None
    if not flat:
        return torch.empty(0, dtype=dtype)
    if dtype != torch.bool:
        return torch.frombuffer(flat, dtype=dtype)
    values = torch.frombuffer(flat, dtype=torch.uint8)
    return values.view(torch.bool) if int(values.max()) <= 1 else None


def _joined(rows: Sequence[Any], dtype: torch.dtype) -> Tensor:
    pieces: list[Tensor] = []
    bad: dict[int, str] = {}
    for n, row in enumerate(rows):
        try:
            pieces.append(_exact(_as_tensor(row), dtype))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            bad[n] = str(error)
    if bad:
        raise _bad_rows(list(bad), f"{next(iter(bad.values())):.100}", dtype)
    filled = [n for n, piece in enumerate(pieces) if len(piece)]
    shapes = {pieces[n].shape[1:] for n in filled}
    if len(shapes) > 1:
        usual = pieces[filled[0]].shape[1:]
        odd = [n for n in filled if pieces[n].shape[1:] != usual]
        raise _bad_rows(odd, f"entries of shape {list(pieces[odd[0]].shape[1:])} beside {list(usual)}", dtype)
    return torch.cat([pieces[n] for n in filled]) if filled else pieces[0]


def _as_tensor(row: Any) -> Tensor:
    if isinstance(row, Tensor):
        return row.detach().cpu()
    if isinstance(row, bytes | bytearray):
        return from_numpy(np.frombuffer(row, np.uint8))
    values = np.asarray(row)
    if values.dtype == np.uint64 and not isinstance(row, np.ndarray):
        raise OverflowError("an integer beyond int64")
    if values.ndim < 1 or (values.size and values.dtype.kind not in "biuf") or 0 in values.shape[1:]:
        raise TypeError(f"a row of dtype {values.dtype} and shape {list(values.shape)}")
    return from_numpy(values)


def _exact(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype == dtype:
        return values
    converted = values.to(dtype)
    if dtype in _INTEGERS and values.dtype != torch.bool and bool((converted.to(values.dtype) != values).any()):
        wrong = values[converted.to(values.dtype) != values][0].item()
        raise ValueError(f"the value {wrong}")
    return converted


def _bad_rows(rows: Sequence[int], got: str, dtype: torch.dtype) -> SampleError:
    return SampleError(
        f"{format_rows(rows)} of a ragged column",
        got=got,
        expected=f"numbers that {str(dtype)[6:]} holds, in rows of one shape",
        reason="all rows become one flat tensor",
        remedy="pass lists of plain numbers, or declare another dtype",
        rows=rows,
    )
