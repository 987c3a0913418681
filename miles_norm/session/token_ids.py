"""What an engine returns per token, as arrays: ids and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import SessionError, format_rows

__all__ = ["LOG_PROB_ROUNDING", "TokenIds", "as_log_probs", "as_token_ids"]

TokenIds = NDArray[np.int32]

_LARGEST_ID = np.iinfo(np.int32).max
LOG_PROB_ROUNDING = 1e-3
"""How far above 0 the rounding of an engine may put the log-prob of a token that was all but certain."""


def as_token_ids(values: Sequence[int] | NDArray[Any], subject: str) -> TokenIds:
    """Token ids as int32 ``[T]``.

    Raises:
        SessionError: values that are no whole numbers between 0 and 2³¹ - 1, or not one-dimensional; all positions are
            named.

    >>> as_token_ids([257, 82], "prompt")
    array([257,  82], dtype=int32)
    """
    ids, got = _one_dimension(values, "iu")
    if not got and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _LARGEST_ID:
        got = _at(ids, (ids < 0) | (ids > _LARGEST_ID))
    if got:
        raise SessionError(
            subject,
            got=got,
            expected=f"token ids: whole numbers from 0 to {_LARGEST_ID} in one dimension",
            reason="the ids are trained as the engine used them",
            remedy="pass the ids that the tokenizer or the engine returned",
        )
    return ids.astype(np.int32, copy=False)


def as_log_probs(values: Sequence[float] | NDArray[Any], tokens: int, subject: str) -> NDArray[np.float32]:
    """A float32 copy of log-probs ``[T]``, as the engine returned them.

    Args:
        values: One for each sampled token.
        tokens: How many were sampled.
        subject: What an error is about.

    Raises:
        SessionError: another number of them, values that are no numbers, not finite in float32, or above 0 by more than
            rounding; all positions are named.

    >>> as_log_probs([-0.5, 0.25], 2, "completion.log_probs")
    Traceback (most recent call last):
    miles_norm.errors.SessionError: completion.log_probs
      got:      0.25 at position 1
      expected: one log-prob for each sampled token, finite and at most 0
      reason:   the loss weighs each sampled token by the probability that it was sampled with
      remedy:   return tokens and log-probs of the same request from the engine
    """
    given, got = _one_dimension(values, "fiu")
    with np.errstate(over="ignore"):
        log_probs = np.empty(0, np.float32) if got else given.astype(np.float32)
    if not got and len(log_probs) != tokens:
        got = f"{tokens} token ids and log_probs of shape {list(log_probs.shape)}"
    if not got:
        bad = ~(np.isfinite(log_probs) & (log_probs <= LOG_PROB_ROUNDING))
        got = _at(given, bad) if bad.any() else ""
    if got:
        raise SessionError(
            subject,
            got=got,
            expected="one log-prob for each sampled token, finite and at most 0",
            reason="the loss weighs each sampled token by the probability that it was sampled with",
            remedy="return tokens and log-probs of the same request from the engine",
        )
    return log_probs


def _one_dimension(values: Any, kinds: str) -> tuple[NDArray[Any], str]:
    """The values as an array, and what is wrong with it."""
    try:
        array = np.asarray(values)
    except Exception as error:  # noqa: BLE001  # Ragged lists, tensors elsewhere, objects that make arrays of themselves.
        return np.empty(0), f"{type(values).__name__} that makes no array: {error}"[:200]
    if array.ndim == 1 and (array.dtype.kind in kinds or not array.size):
        return array if array.size else np.empty(0, np.int32), ""
    return array, f"an array of dtype {array.dtype} and shape {list(array.shape)}"


def _at(values: NDArray[Any], bad: NDArray[np.bool_]) -> str:
    """The values that are bad, and where."""
    positions = np.flatnonzero(bad).tolist()
    return f"{', '.join(map(str, values[positions[:5]].tolist()))} at {format_rows(positions, 'position')}"
