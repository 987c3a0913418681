"""Token ids as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import SessionError

__all__ = ["TokenIds", "as_token_ids"]

TokenIds = NDArray[np.int32]


def as_token_ids(values: Sequence[int] | NDArray[Any], subject: str) -> TokenIds:
    """Token ids as int32 ``[T]``.

    Raises:
        SessionError: values that are no whole numbers between 0 and 2³¹ - 1, or not one-dimensional.

    >>> as_token_ids([257, 82], "prompt")
    array([257,  82], dtype=int32)
    """
    ids = np.asarray(values) if len(values) else np.empty(0, np.int32)
    limit = np.iinfo(np.int32).max
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= limit):
        raise SessionError(
            subject,
            got=f"an array of dtype {ids.dtype} and shape {list(ids.shape)}",
            expected=f"token ids: whole numbers from 0 to {limit} in one dimension",
            reason="the ids are trained as the engine used them",
            remedy="pass the ids that the tokenizer or the engine returned",
        )
    return ids.astype(np.int32, copy=False)
