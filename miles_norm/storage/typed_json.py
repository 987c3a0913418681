"""Values as JSON that keeps their types: tuples, bytes, arrays, tensors, dicts with keys that are no strings.

What JSON has stays plain JSON. Everything else is an object with the key ``$``, which names the type.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.storage.dtypes import DTYPE_NAMES, DTYPES, tensor_bytes, tensor_from_bytes

__all__ = ["dumps", "loads"]

_LEAVES = frozenset({int, str, bool, type(None)})
# Integers up to here have few enough digits for any JSON reader.
_PLAIN_INT = 2**1024
_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:[biufc]\d{1,2}|[SU]\d{1,6})")
_to_text = json.JSONEncoder(separators=(",", ":")).encode
_NAN = struct.pack("<d", math.nan)


def dumps(value: Any, keep: Callable[[Tensor], int | None] = lambda tensor: None) -> str:
    """Encode a plain value, as ``plain_mapping(..., keep_arrays=True)`` returns it, in ASCII.

    Args:
        value: What to encode.
        keep: Asked for each tensor; returns the number under which it is stored elsewhere, None to store it here.

    >>> dumps({"a": (1, 2.5), 3: b"x"})
    '{"$":"dict","items":[["a",{"$":"tuple","items":[1,2.5]}],[3,{"$":"bytes","data":"eA=="}]]}'
    """
    return _to_text(_encode(value, keep))


def loads(text: str, kept: Callable[[int], Tensor] | None = None) -> Any:
    """Decode what ``dumps`` wrote; ``kept`` finds tensors that are stored elsewhere.

    Raises:
        ValueError, TypeError, KeyError, RecursionError and others: text that ``dumps`` did not write.

    >>> loads(dumps({"a": (1, 2.5), 3: b"x"}))
    {'a': (1, 2.5), 3: b'x'}
    """
    return _decode(json.loads(text), kept)


def _encode(value: Any, keep: Callable[[Tensor], int | None]) -> Any:
    kind = type(value)
    if kind is int and abs(value) >= _PLAIN_INT:
        return {"$": "int", "hex": hex(value)}
    if kind in _LEAVES:
        return value
    if kind is float:
        # JSON has one NaN; the others keep their bits.
        odd = value != value and struct.pack("<d", value) != _NAN
        return {"$": "float", "hex": struct.pack("<d", value).hex()} if odd else value
    if kind is list:
        return [_encode(item, keep) for item in value]
    if kind is dict:
        if "$" not in value and all(type(key) is str for key in value):
            return {key: _encode(item, keep) for key, item in value.items()}
        return {"$": "dict", "items": [[_encode(key, keep), _encode(item, keep)] for key, item in value.items()]}
    if kind in (tuple, set):
        return {"$": kind.__name__, "items": [_encode(item, keep) for item in value]}
    if kind is bytes:
        return {"$": "bytes", "data": _text(value)}
    if kind is complex:
        return {"$": "complex", "parts": [_encode(value.real, keep), _encode(value.imag, keep)]}
    if isinstance(value, Tensor):
        return _encode_tensor(value, keep)
    if isinstance(value, np.ndarray | np.generic):
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"$": name, "dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}
    raise TypeError(f"a value of type {kind.__name__}")


def _encode_tensor(value: Tensor, keep: Callable[[Tensor], int | None]) -> dict[str, Any]:
    number = keep(value)
    if number is not None:
        return {"$": "kept", "number": number}
    dtype = DTYPE_NAMES.get(value.dtype)
    if dtype is None:
        raise TypeError(f"a tensor of dtype {value.dtype}")
    return {"$": "tensor", "dtype": dtype, "shape": list(value.shape), "data": _text(tensor_bytes(value))}


def _decode(value: Any, kept: Callable[[int], Tensor] | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: _decode(item, kept) for key, item in value.items()}
    kind = value["$"]
    if kind == "dict":
        return {_decode(key, kept): _decode(item, kept) for key, item in value["items"]}
    if kind in ("tuple", "set"):
        items = [_decode(item, kept) for item in value["items"]]
        return tuple(items) if kind == "tuple" else set(items)
    if kind == "bytes":
        return _data(value)
    if kind == "int":
        return int(value["hex"], 16)
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(value["hex"]))[0]
    if kind == "complex":
        return complex(*[float(_decode(part, kept)) for part in value["parts"]])
    if kind == "kept" and kept is not None:
        return kept(value["number"])
    if kind == "tensor":
        return tensor_from_bytes(_data(value), DTYPES[value["dtype"]], _shape(value))
    if kind in ("array", "scalar") and _NUMPY_DTYPE.fullmatch(value["dtype"]):
        dtype, shape = np.dtype(value["dtype"]), _shape(value)
        data = _data(value)
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError("an array whose data does not fill its shape")
        array = np.ndarray(shape, dtype, data).copy()
        return array if kind == "array" else array[()]
    raise ValueError(f"an unknown type {kind!r:.50}")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _data(value: dict[str, Any]) -> bytes:
    return base64.b64decode(value["data"], validate=True)


def _shape(value: dict[str, Any]) -> torch.Size:
    if not all(type(size) is int and 0 <= size < 2**48 for size in value["shape"]):
        raise ValueError(f"the shape {value['shape']!r:.50}")
    return torch.Size(value["shape"])
