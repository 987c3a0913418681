"""Stand-ins that numpy's arrays and numbers unpickle as, for reading files of unknown origin.

numpy's own reconstruction functions trust what they are given: a crafted dtype state can point outside its buffer.
These accept plain numeric and text dtypes only, check every length, and build the real array themselves.
"""

import math
import pickle
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["NUMPY_STAND_INS", "resolve_arrays"]


class _Dtype:
    """Stand-in for ``numpy.dtype``: a numeric or text type with a byte order, and no other state."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not (isinstance(code, str) and re.fullmatch(r"[biufc]\d{1,2}|[SU]\d{1,6}", code)):
            raise pickle.UnpicklingError(f"a numpy value of dtype {code!r:.50}")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"a numpy dtype with byte order {state[1]!r:.50}")
        self.order = state[1]

    def resolve(self) -> Any:
        import numpy as np

        return np.dtype(self.order + self.code)


class _Array:
    """Stand-in for ``numpy.ndarray``, replaced by the real array once the whole file is loaded."""

    __hash__ = None  # type: ignore[assignment]  # an array is no dict key and no set element

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        import numpy as np

        _, shape, dtype, fortran, data = state
        target = dtype.resolve()
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * target.itemsize:
            raise pickle.UnpicklingError(f"a numpy array whose data does not fill its shape {shape!r:.100}")
        self.array = np.ndarray(shape, target, data, order="F" if fortran else "C").copy(order="K")

    def resolve(self) -> Any:
        return self.array


def _reconstruct(kind: type, shape: Any, code: Any) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    import numpy as np

    return np.ndarray((), dtype.resolve(), data)[()]


def _empty_bytes() -> bytes:
    # Protocol 2 writes b"" as a call of bytes without arguments, and other bytes through _codecs.encode.
    return b""


NUMPY_STAND_INS: Mapping[str, Any] = MappingProxyType(
    {
        "numpy.dtype": _Dtype,
        "numpy.ndarray": _Array,
        "numpy.core.multiarray._reconstruct": _reconstruct,
        "numpy._core.multiarray._reconstruct": _reconstruct,
        "numpy.core.multiarray.scalar": _scalar,
        "numpy._core.multiarray.scalar": _scalar,
        "builtins.bytes": _empty_bytes,
    }
)
"""What stands in for each name that a pickled array refers to."""

_LEAVES = frozenset({int, float, str, bool, type(None)})


def resolve_arrays(root: Any) -> Any:
    """Put real arrays where their stand-ins are, in place in dicts and lists."""
    pending: list[Any] = [root]
    seen: set[int] = set()

    def settle(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(settle(item) for item in value)
        if isinstance(value, dict | list):
            pending.append(value)
        return value.resolve() if isinstance(value, _Array | _Dtype) else value

    while pending:
        node = pending.pop()
        if id(node) in seen or (isinstance(node, list) and _LEAVES.issuperset(map(type, node))):
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            node.update({key: settle(value) for key, value in node.items()})
        elif isinstance(node, list):
            node[:] = [settle(value) for value in node]
    return root
