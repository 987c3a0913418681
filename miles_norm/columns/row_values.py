"""Values of single fields of rows, as they come out of objects, tables and tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor

from miles_norm.columns.ids import plain_id
from miles_norm.errors import SampleError, format_rows, shown

__all__ = ["adapter_name", "read_flags", "read_statuses", "response_length", "row_length"]


def read_flags(name: str, values: list[Any]) -> list[bool]:
    """Bools; None and NaN, as tables have it in empty cells, are False.

    Raises:
        SampleError: anything else than a bool, 0 or 1; all rows are named.
    """
    kinds = set(map(type, values))
    if kinds <= {bool, NoneType}:
        return values if NoneType not in kinds else list(map(bool, values))
    flags = [plain_id(value) for value in values]
    known = [(row, flag) for row, flag in enumerate(flags) if flag is not None]
    bad = [row for row, flag in known if type(flag) not in (bool, int) or flag not in (0, 1)]
    if bad:
        raise SampleError(
            f"{name} of {format_rows(bad)}",
            got=", ".join(shown(values[row]) for row in bad[:5]),
            expected="True or False; None where it is not set",
            reason="it decides whether a row is trained and counted",
            remedy="write it as a bool",
            rows=bad,
        )
    return [bool(flag) for flag in flags]


def read_statuses(values: list[Any]) -> list[str | None]:
    """Statuses in lower case, of strings and of enums."""
    if set(map(type, values)) <= {str, NoneType}:
        known = {value: _status(value) for value in set(values)}
        return [known[value] for value in values]
    return [_status(value) for value in values]


def _status(value: Any) -> str | None:
    value = getattr(value, "value", value)
    return None if value is None else str(value).lower()


def adapter_name(value: Any) -> Hashable:
    """An adapter is named by a string, by a mapping or object with a ``name``, or by any other id."""
    if isinstance(value, Mapping):
        return value.get("name")
    if isinstance(value, Tensor | np.generic | np.ndarray):
        return plain_id(value)  # type: ignore[no-any-return]  # a tensor has a name of its own
    return getattr(value, "name", value)  # type: ignore[no-any-return]


def response_length(value: Any) -> int:
    """``response_length`` of a row as an int; ValueError says what is wrong with it.

    >>> response_length(np.int64(3)), response_length(2.0)
    (3, 2)
    """
    if value is None:
        raise ValueError("neither loss_mask nor response_length")
    number = plain_id(value)
    if type(number) is not int or not 0 <= number < 2**31:
        raise ValueError(f"response_length {shown(value)}")
    return number


def row_length(value: Any) -> int | None:
    """Entries of a list, array or tensor; None of what has no length.

    >>> row_length([7, 8]), row_length(7)
    (2, None)
    """
    try:
        return len(value)
    except (TypeError, RuntimeError):  # the second of nested tensors
        return None
