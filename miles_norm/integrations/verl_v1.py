"""verl's v1 trainer: the rollout of each row, out of the key under which verl stores it.

    VERL_USE_EXTERNAL_MODULES=miles_norm.integrations.verl_v1

Needed where an agent loop returns several rows. The keys are ``{uid}_{session}_{row}``, and verl compares them in
``compute_advantage_for_multi_trajectories`` for its own ``grpo`` only; importing this module puts ``RolloutUid`` in
front of that function for the estimators of ``miles_norm.integrations.verl``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from verl.trainer.ppo.v1 import trainer_base, utils

from miles_norm.columns.ids import entries_of
from miles_norm.errors import SampleError, format_rows, shown
from miles_norm.integrations.verl import rollout_uids
from miles_norm.integrations.verl_config import ADVANTAGES, WEIGHTED

__all__ = ["session_uids"]

_compute = utils.compute_advantage_for_multi_trajectories


def session_uids(keys: Sequence[str], uids: Sequence[str]) -> np.ndarray[Any, Any]:
    """The uid of each row with the session in its key.

    Raises:
        SampleError: keys of another form, or of another prompt than the uid beside them, all rows named; another number
            of uids.

    >>> [uid.rollout for uid in session_uids(["p_0_0", "p_0_1", "p_1_0"], ["p", "p", "p"])]
    ['0', '0', '1']
    """
    given, prompts = entries_of(keys), entries_of(uids)
    if given is None or prompts is None or len(given) != len(prompts):
        counts = ("none" if each is None else len(each) for each in (given, prompts))
        raise _bad_keys("keys", "{} keys beside {} uids".format(*counts))
    parts = [
        key.rsplit("_", 2) if isinstance(key, str) and isinstance(uid, str) else []
        for key, uid in zip(given, prompts, strict=True)
    ]
    bad = [
        row
        for row, (part, uid) in enumerate(zip(parts, prompts, strict=True))
        if len(part) != 3 or part[0] != uid or not part[2].isdigit()
    ]
    if bad:
        got = ", ".join(f"{shown(given[row])} with uid {shown(prompts[row])}" for row in bad[:3])
        raise _bad_keys(f"keys of {format_rows(bad)}", got, bad)
    return rollout_uids([part[0] for part in parts], [part[1] for part in parts])


def _bad_keys(subject: str, got: str, rows: Sequence[int] = ()) -> SampleError:
    return SampleError(
        subject,
        got=got,
        expected="{uid}_{session}_{row} for each row",
        reason="the key says which rollout a row belongs to",
        remedy="keep the keys that verl's agent loop manager gives, or set the column uid to rollout_uids(...)",
        rows=rows,
    )


@functools.wraps(_compute)
def _with_rollouts(data: Any, batch_keys: Sequence[str], adv_estimator: Any, *args: Any, **settings: Any) -> Any:
    if adv_estimator in (ADVANTAGES, WEIGHTED):
        data.non_tensor_batch["uid"] = session_uids(batch_keys, data.non_tensor_batch["uid"])
    return _compute(data, batch_keys, adv_estimator, *args, **settings)


utils.compute_advantage_for_multi_trajectories = _with_rollouts
trainer_base.compute_advantage_for_multi_trajectories = _with_rollouts
