"""Turn the values of a row into plain ones that a file can hold."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["NotPlainError", "json_line", "plain_mapping"]

_LEAVES = frozenset({int, float, str, bool, type(None)})
_BINARY_LEAVES = (bytes, complex)
_ARRAY_KINDS = "biufcSU"


class NotPlainError(Exception):
    """A value that cannot be written; the message says where it is and what it is."""


def plain_mapping(row: Mapping[str, Any], *, keep_arrays: bool) -> dict[str, Any]:
    """Return ``row`` with plain values; lists of numbers are passed on, not copied.

    An Enum becomes its value, a dataclass a dict. With ``keep_arrays``, tensors (on the CPU, without unused storage),
    arrays, bytes, complex numbers and sets stay what they are; without it, tensors and arrays become lists.

    Raises:
        NotPlainError: Any other value.
    """
    plain = {}
    for key, value in row.items():
        try:
            plain[key] = _plain(value, key, keep_arrays)
        except RecursionError:
            raise NotPlainError(f"{key!r}: nested too deeply, or inside itself") from None
    return plain


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a plain row as one line of JSON, in ASCII, with its line feed."""
    try:
        return json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n"
    except ValueError as error:  # an integer with more digits than Python prints
        for key, value in row.items():
            try:
                json.dumps(value)
            except ValueError:
                raise NotPlainError(f"{key!r}: {error}") from error
        raise


def _plain(value: Any, where: str, keep_arrays: bool) -> Any:
    kind = type(value)
    if kind in _LEAVES or (kind is list and _LEAVES.issuperset(map(type, value))):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{n}]", keep_arrays) for n, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) and keep_arrays else items
    if isinstance(value, Mapping):
        bad = [key for key in value if not (isinstance(key, str) or (keep_arrays and type(key) in _LEAVES))]
        if bad:
            raise NotPlainError(f"{where!r}: a key of type {type(bad[0]).__name__}")
        return {key: _plain(item, f"{where}.{key}", keep_arrays) for key, item in value.items()}
    if isinstance(value, Enum):
        return _plain(value.value, where, keep_arrays)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        return _plain(fields, where, keep_arrays)
    if callable(getattr(value, "tolist", None)):
        return _plain_array(value, where, keep_arrays)
    if keep_arrays and (kind in _BINARY_LEAVES or (kind is set and _LEAVES.issuperset(map(type, value)))):
        return value
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    raise NotPlainError(f"{where!r}: a value of type {kind.__name__}")


def _plain_array(value: Any, where: str, keep_arrays: bool) -> Any:
    # A tensor can only be here when torch is loaded; rows without tensors are written without it.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise NotPlainError(f"{where!r}: a tensor that is sparse, quantized or without data")
        tensor = value.detach().cpu()
        if not keep_arrays:
            return _plain(tensor.tolist(), where, keep_arrays)
        # A view would drag its whole storage into the file.
        used = tensor.numel() * tensor.element_size()
        whole = tensor.untyped_storage().nbytes() == used
        return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    dtype_kind = getattr(getattr(value, "dtype", None), "kind", "")
    if keep_arrays and dtype_kind and dtype_kind in _ARRAY_KINDS:
        return value
    as_list = value.tolist()
    if hasattr(as_list, "tolist") or (keep_arrays and dtype_kind):
        raise NotPlainError(f"{where!r}: an array of dtype {value.dtype}")
    return _plain(as_list, where, keep_arrays)
