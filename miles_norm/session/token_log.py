"""Token ids of growing contexts, so that a long conversation is held once and not once per turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import SessionError

__all__ = ["TokenIds", "TokenLog", "as_token_ids"]

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


class TokenLog:
    """Ids that are only added to. Every context is a beginning of one log.

    Adding to the end costs what is added, on average. Adding elsewhere is a branch and copies what came before.
    """

    __slots__ = ("_buffer", "_size")

    def __init__(self, ids: TokenIds) -> None:
        self._buffer = np.array(ids, np.int32)
        self._size = len(ids)

    def ids(self, end: int) -> TokenIds:
        """The first ``end`` ids, as a view that cannot be written to."""
        view = self._buffer[:end]
        view.flags.writeable = False
        return view

    def extended(self, end: int, ids: TokenIds) -> TokenLog:
        """A log in which ``ids`` stand behind the first ``end`` ids: this one where it ends there, else a new one."""
        if end != self._size:
            return TokenLog(np.concatenate([self._buffer[:end], ids]))
        needed = end + len(ids)
        if needed > len(self._buffer):
            # Views of the old buffer keep it, so it is left as it is.
            grown = np.empty(max(needed, 2 * len(self._buffer)), np.int32)
            grown[:end] = self._buffer[:end]
            self._buffer = grown
        self._buffer[end:needed] = ids
        self._size = needed
        return self
