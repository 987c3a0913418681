"""What the loss side refuses, said once: other types, numbers, shapes, and indices that lead nowhere.

Types, dtypes and shapes are known without asking a device, so they are checked everywhere. Values are checked on the
CPU only: on another device the host would wait for every kernel before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from miles_norm.errors import SampleError, format_rows, shown

__all__ = [
    "FLOATS",
    "NUMBERS",
    "WHOLE",
    "check_type",
    "checked_index",
    "described",
    "is_dense",
    "is_number",
    "is_whole",
    "number_pair",
    "on_cpu",
    "out_of_range",
    "whole_tensor",
    "wrong_tensor",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What log-probs and losses may be; token ids, which are whole numbers, are none."""

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""What indices may be; torch would take a bool, and a uint8 too, for a mask."""

NUMBERS = (*WHOLE, *FLOATS)
"""What torch can calculate with; the wider unsigned integers only fill memory."""

_LARGEST = torch.finfo(torch.float32).max


def on_cpu(tensor: Tensor) -> bool:
    """Whether values can be looked at, without waiting for a device and outside of a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def is_whole(value: Any, low: int = 0) -> bool:
    """A whole number from ``low`` on that int64 can hold, Python's or numpy's; True and 2.0 are none.

    >>> is_whole(3), is_whole(True), is_whole(2.0), is_whole(0, low=1)
    (True, False, False, False)
    """
    return not isinstance(value, bool) and isinstance(value, Integral) and low <= int(value) < 2**63


def is_number(value: Any, low: float) -> bool:
    """A number from ``low`` on that float32 can hold, so none that is NaN or infinite; True is none.

    >>> is_number(0.5, 0), is_number(float("nan"), 0), is_number(True, 0), is_number("1", 0)
    (True, False, False, False)
    """
    return not isinstance(value, bool) and isinstance(value, Real) and low <= value <= _LARGEST  # type: ignore[operator]


def number_pair(value: Any, low: float) -> tuple[float, float] | None:
    """Two finite numbers from ``low`` on, of a tuple or a list; None if it is anything else.

    >>> number_pair([0.2, 1], 0), number_pair(0.2, 0), number_pair((-1, 0), 0)
    ((0.2, 1.0), None, None)
    """
    if isinstance(value, tuple | list) and len(value) == 2 and all(is_number(bound, low) for bound in value):
        return float(value[0]), float(value[1])
    return None


def is_dense(value: Any) -> bool:
    """A tensor of real numbers that has an entry in every place: neither sparse nor nested.

    >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse()), is_dense([1.0])
    (True, False, False)
    """
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return plain and not value.is_complex()


def described(value: object) -> str:
    """Type, shape and device of a tensor, or the type of anything else.

    >>> described(torch.zeros(2, 3)), described([0.5])
    ('torch.float32 of shape [2, 3] on cpu', 'a value of type list')
    """
    if isinstance(value, Tensor) and not value.is_nested:
        sparse = "" if value.layout == torch.strided else f", {value.layout}"
        return f"{value.dtype} of shape {list(value.shape)} on {value.device}{sparse}"
    return f"a value of type {type(value).__name__}"


def check_type(name: str, value: object, kind: type, remedy: str) -> None:
    """Refuse anything but an object of the package.

    Raises:
        SampleError: naming both types.
    """
    if not isinstance(value, kind):
        raise SampleError(
            name,
            got=described(value),
            expected=f"a value of type {kind.__name__}",
            reason="which rows belong together is read from it, and never guessed",
            remedy=remedy,
        )


def wrong_tensor(name: str, value: object, expected: str) -> SampleError:
    """What to raise for a tensor that does not fit the others, or is none."""
    return SampleError(
        name,
        got=described(value),
        expected=expected,
        reason="what does not fit would be stretched over the other tensors, and every token would get wrong numbers",
        remedy="pad all of them to [N, T] or pack all of them to [T]; for packed rows pass the row of each token",
    )


def whole_tensor(name: str, tensor: Any, expected: str) -> Tensor:
    """A one-dimensional tensor of whole numbers as int64.

    Raises:
        SampleError: another type, dtype or number of dimensions.

    >>> whole_tensor("row index", torch.tensor([0, 1], dtype=torch.uint8), "the row of each token")
    tensor([0, 1])
    """
    if not is_dense(tensor) or tensor.ndim != 1 or tensor.dtype not in WHOLE:
        raise wrong_tensor(name, tensor, f"whole numbers: {expected}")
    whole: Tensor = tensor.detach().to(torch.int64)
    return whole


def checked_index(name: str, index: object, size: int, expected: str) -> Tensor:
    """``whole_tensor`` with numbers from 0 to ``size`` - 1; the range is checked on the CPU only.

    Raises:
        SampleError: numbers out of range too, their positions named.
    """
    whole = whole_tensor(name, index, expected)
    if on_cpu(whole):
        outside = torch.nonzero((whole < 0) | (whole >= size))[:, 0].tolist()
        if outside:
            raise out_of_range(name, [int(whole[position]) for position in outside], outside, size, expected)
    return whole


def out_of_range(
    name: str, values: Sequence[object], positions: Sequence[int], size: int, expected: str
) -> SampleError:
    """What to raise for entries of an index that lead nowhere."""
    return SampleError(
        f"{name} at {format_rows(positions, 'position')}",
        got=", ".join(shown(value) for value in values[:10]),
        expected=f"{expected}, {f'0 to {size - 1}' if size else 'of which there are none'}",
        reason="a number below 0 would count from the end, and give a token what belongs to another row",
        remedy="number the rows from 0, within the micro-batch or the result that the index points into",
    )
