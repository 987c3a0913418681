"""The uid of each row of verl's batches, which also says the rollout. verl itself is not needed."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miles_norm.columns.ids import encode_ids, entries_of, plain_id
from miles_norm.errors import SampleError, format_rows, shown

__all__ = ["RolloutUid", "RowUids", "rollout_uids", "uids_of_rows"]

# What verl fills a batch up with has uids of its own, and no trainable token.
_PADDING_UID = re.compile("pad[0-9a-f]{32}")

_NO_COLUMNS = (str, bytes, dict, np.ndarray, torch.Tensor)
"""What can be gone through but is no column: letters, keys, and a tensor without a dimension."""

logger = logging.getLogger("miles_norm")


class RolloutUid(str):
    """The uid of a prompt that also says which rollout the row belongs to.

    verl hands an estimator nothing of a row but its uid. To all of verl this is the prompt's uid, since it compares and
    hashes as the string: groups, filters and metrics do not change.

    >>> uid = RolloutUid("9f2c", 3)
    >>> uid == "9f2c", uid.rollout
    (True, 3)
    """

    rollout: Hashable

    def __new__(cls, prompt: str, rollout: Hashable) -> RolloutUid:
        """``rollout`` is unique within the prompt."""
        uid = super().__new__(cls, prompt)
        uid.rollout = rollout
        return uid

    def __getnewargs__(self) -> tuple[str, Hashable]:  # type: ignore[override]
        return str(self), self.rollout


def rollout_uids(prompts: Iterable[str], rollouts: Iterable[Hashable]) -> np.ndarray[Any, Any]:
    """The column ``uid`` for rows of several rollouts: ``data.non_tensor_batch["uid"] = rollout_uids(...)``.

    Args:
        prompts: The prompt's uid of each row.
        rollouts: The rollout's id of each row, unique within its prompt; None for a row that is a rollout of its own.

    Raises:
        SampleError: different numbers of prompts and rollouts, prompts that are no strings, ids that are bools or
            cannot be hashed; all rows are named.

    >>> rollout_uids(["p", "p"], [0, 1])
    array(['p', 'p'], dtype=object)
    """
    uids, ids = _listed("prompts", prompts), _listed("rollouts", rollouts)
    if len(uids) != len(ids):
        raise _bad_uids("prompts and rollouts", f"{len(uids)} prompts, {len(ids)} rollouts", "one of each per row")
    odd = [row for row, uid in enumerate(uids) if not isinstance(uid, str)]
    if odd:
        raise _bad_uids(
            f"prompts of {format_rows(odd)}", ", ".join(shown(uids[row]) for row in odd[:5]), "strings", odd
        )
    encode_ids(ids, "rollout", len(ids))
    return np.array([RolloutUid(uid, plain_id(rollout)) for uid, rollout in zip(uids, ids, strict=True)], dtype=object)


@dataclass(frozen=True, eq=False, slots=True)
class RowUids:
    """The uids of a batch, one per row."""

    prompts: list[Any]
    padding: list[bool]
    """Rows that fill up the batch."""

    def rollouts(self, n: int | None) -> list[Hashable] | None:
        """The rollout of each row; None if no uid says one.

        Args:
            n: Rollouts of a prompt, to find siblings whose uids do not say so; None where it is not known.

        Raises:
            SampleError: uids of which only some name a rollout, ids that are bools or cannot be hashed, more than ``n``
                rows with a plain uid; all rows are named.
        """
        uids, padding = self.prompts, self.padding
        plain = [row for row, uid in enumerate(uids) if not isinstance(uid, RolloutUid) and not padding[row]]
        if plain and len(plain) < len(uids) - sum(padding):
            raise SampleError(
                f"uid of {format_rows(plain)}",
                got="no rollout, while other rows have one",
                expected="a RolloutUid on every row, or on none",
                reason="a row without one would be a rollout of its own",
                remedy="make the column with rollout_uids(...)",
                rows=plain,
            )
        if not plain:
            ids = [plain_id(getattr(uid, "rollout", None)) for uid in uids]
            encode_ids(ids, "rollout", len(ids))
            # The same ids are used for every prompt.
            return [None if rollout is None else (str(uid), rollout) for uid, rollout in zip(uids, ids, strict=True)]
        if n is None:
            _warn_of_plain_uids()
        else:
            _refuse_siblings_without_ids([uids[row] for row in plain], plain, n)
        return None


def uids_of_rows(index: Any, rows: int) -> RowUids:
    """The column ``uid`` of a batch.

    Raises:
        SampleError: no such column, another number of uids than rows, uids that cannot be hashed; all rows are named.
    """
    if index is None:
        raise SampleError(
            "uid",
            got="no such column in data.non_tensor_batch",
            expected="the uid of each row's prompt",
            reason="advantages are relative to the other rollouts of the prompt",
            remedy='set data.non_tensor_batch["uid"], for rollouts of several rows to rollout_uids(...)',
        )
    encode_ids(index, "uid", rows)
    uids = [uid if isinstance(uid, str) else plain_id(uid) for uid in entries_of(index) or ()]
    return RowUids(uids, [isinstance(uid, str) and _PADDING_UID.fullmatch(uid) is not None for uid in uids])


def _refuse_siblings_without_ids(uids: list[Any], rows: list[int], n: int) -> None:
    counts = Counter(uids)
    extra = [row for row, uid in zip(rows, uids, strict=True) if counts[uid] > n]
    if extra:
        raise SampleError(
            f"uid of {format_rows(extra)}",
            got=f"up to {max(counts.values())} rows of one prompt, and no rollout ids",
            expected=f"at most rollout.n={n} rows with a plain uid, since each is then a rollout",
            reason="siblings would be counted as rollouts",
            remedy="with verl's v1 trainer set VERL_USE_EXTERNAL_MODULES=miles_norm.integrations.verl_v1 in its "
            'environment; in a trainer of your own set data.non_tensor_batch["uid"] to rollout_uids(...)',
            rows=extra,
        )


@functools.cache
def _warn_of_plain_uids() -> None:
    logger.warning(
        "the uids name no rollouts, and rollout.n is not at hand to compare with: each row counts as a rollout; "
        "if rollouts have several rows, make the column uid with rollout_uids(...)"
    )


def _listed(name: str, values: Any) -> list[Any]:
    entries = entries_of(values)
    if entries is None and isinstance(values, Iterable) and not isinstance(values, _NO_COLUMNS):
        entries = list(values)
    if entries is None:
        raise _bad_uids(name, f"a value of type {type(values).__name__}", "one id per row")
    return entries


def _bad_uids(subject: str, got: str, expected: str, rows: list[int] | None = None) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected=expected,
        reason="rows of one prompt and one rollout are siblings",
        remedy="pass the prompt's uid and the rollout's id of each row",
        rows=rows or (),
    )
