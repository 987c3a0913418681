"""Which leaves become rows, and what is done to the rows: plain functions that Miles' session server can call as well.

All have the signature ``f(leaf_samples, session_metadata) -> list``. They read ``sample.metadata["leaf"]`` (node_id,
parent, path_node_ids, response_id), ``session_metadata["tree"]`` (nodes and leaves) and ``session_metadata["agent"]``
(what the agent returned), and set no field but ``loss_mask`` and ``reward``.
"""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from miles_norm.errors import HookError, format_rows, shown

__all__ = [
    "Picker",
    "PostProcessor",
    "assign_reward",
    "drop_retries",
    "keep_all",
    "leaf_rewards",
    "mask_ownership",
    "pick",
    "process",
    "row_order",
    "run_hook",
]

Picker = Callable[[list[Any], dict[str, Any]], list[Any]]
PostProcessor = Callable[[list[Any], dict[str, Any]], list[Any]]


def keep_all(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Picker: every leaf."""
    return sorted(leaf_samples, key=row_order, reverse=True)


def drop_retries(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Picker: leave out leaves that a retry superseded, those whose parent has a later child.

    First turns are kept, since a later tree may as well be a sub-agent or a compacted conversation. Parallel branches
    that end after one turn look like retries: keep them with ``keep_all``.

    >>> from miles_norm import Sample
    >>> nodes = [{"id": 0, "parent": None}, {"id": 1, "parent": 0}, {"id": 2, "parent": 0}]
    >>> leaves = [{"node_id": n, "parent": 0, "path_node_ids": [0, n]} for n in (1, 2)]
    >>> kept = drop_retries([Sample(metadata={"leaf": leaf}) for leaf in leaves], {"tree": {"nodes": nodes}})
    >>> [sample.metadata["leaf"]["node_id"] for sample in kept]
    [2]
    """
    latest: dict[Any, int] = {}
    for node in session_metadata["tree"]["nodes"]:
        if node["parent"] is not None:
            latest[node["parent"]] = max(node["id"], latest.get(node["parent"], -1))
    kept = [
        sample
        for sample in leaf_samples
        if sample.metadata["leaf"]["node_id"] >= latest.get(sample.metadata["leaf"]["parent"], -1)
    ]
    return sorted(kept, key=row_order, reverse=True)


def row_order(sample: Any) -> tuple[int, int]:
    """Number of turns, then commit; both descend from row to row, as Miles has them."""
    leaf = sample.metadata["leaf"]
    return len(leaf["path_node_ids"]), leaf["path_node_ids"][-1]


def mask_ownership(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Post-processor: a turn that several rows share stays trainable in that of the leaf that was committed first.

    Only among the rows that are given: call it after picking. Log-probs stay as they are.
    """
    if len({sample.metadata["leaf"]["node_id"] for sample in leaf_samples}) < 2:
        return list(leaf_samples)
    spans = {node["id"]: node["completion_span"] for node in session_metadata["tree"]["nodes"]}
    owner: dict[int, int] = {}
    for sample in leaf_samples:
        leaf = sample.metadata["leaf"]
        for node in leaf["path_node_ids"]:
            owner[node] = min(leaf["node_id"], owner.get(node, leaf["node_id"]))
    for sample in leaf_samples:
        leaf = sample.metadata["leaf"]
        shared = [node for node in leaf["path_node_ids"] if owner[node] != leaf["node_id"]]
        if not shared:
            continue
        length = sample.response_length
        response_start = len(sample.tokens) - length
        mask: Any = [1] * length if sample.loss_mask is None else sample.loss_mask.copy()
        for node in shared:
            # A row that was cut ends before turns of its path.
            start, stop = (min(max(position - response_start, 0), length) for position in spans[node])
            mask[start:stop] = 0 if isinstance(mask, np.ndarray) else [0] * (stop - start)
        sample.loss_mask = mask
    return list(leaf_samples)


def assign_reward(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Post-processor: the agent's ``reward`` to every row; without one the rows stay as they are."""
    agent = session_metadata.get("agent") or {}
    if "reward" in agent:
        for sample in leaf_samples:
            sample.reward = agent["reward"]
    return list(leaf_samples)


def leaf_rewards(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Post-processor: a reward per leaf, from the agent's ``rewards``: response id of the leaf's last turn -> reward.

    Rows of other leaves stay as they are; an entry of a leaf that was not picked, or of a turn that was continued,
    goes to no row.

    Raises:
        HookError: a response id that no turn of the session has.
    """
    rewards = (session_metadata.get("agent") or {}).get("rewards") or {}
    unknown = sorted(map(str, rewards.keys() - {node["response_id"] for node in session_metadata["tree"]["nodes"]}))
    if unknown:
        raise HookError(
            "rewards of the agent",
            got=f"{format_rows(unknown, 'response id')}, which no turn of the session has",
            expected="ids of responses that this session returned",
            reason="a reward that reaches no row would leave its leaf unscored in silence",
            remedy="use the id of the chat completion that ended the leaf",
        )
    for sample in leaf_samples:
        response_id = sample.metadata["leaf"]["response_id"]
        if response_id in rewards:
            sample.reward = rewards[response_id]
    return list(leaf_samples)


def pick(picker: Picker, leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Let a picker choose among leaves; it may select and order, and nothing else.

    Raises:
        HookError: it invented, repeated or edited a sample, edited the metadata, or returned no list; the message names
            leaf and field.
    """
    numbers = {id(sample): number for number, sample in enumerate(leaf_samples)}
    names = [sample.metadata["leaf"]["node_id"] for sample in leaf_samples]
    metadata = dict(session_metadata)
    before, metadata_before = _copies(leaf_samples), _copy(metadata)
    picked = run_hook(picker, leaf_samples, metadata)
    edited = [
        f"the {', '.join(changed)} of leaf {name}"
        for name, old, new in zip(names, before, _copies(leaf_samples), strict=True)
        if (changed := [field for field in old if new[field] != old[field]])
    ]
    if _copy(metadata) != metadata_before:
        edited.append("session_metadata")
    if edited:
        raise _not_a_selection(picker, f"it edited {'; '.join(edited)}")
    chosen = [numbers.get(id(sample)) for sample in picked]
    if None in chosen:
        raise _not_a_selection(picker, f"it invented {chosen.count(None)} of {len(chosen)} samples")
    repeated = [names[number] for number, times in Counter(chosen).items() if number is not None and times > 1]
    if repeated:
        raise _not_a_selection(picker, f"it returned {format_rows(repeated, 'leaf')} more than once")
    return picked


def process(post_processor: PostProcessor, samples: Sequence[Any], session_metadata: dict[str, Any]) -> list[Any]:
    """Let a post-processor change and drop rows.

    Raises:
        HookError: it repeated a row, whose tokens would be trained twice, or returned something else, or no list.
    """
    found = run_hook(post_processor, samples, session_metadata)
    repeated = len(found) - len(set(map(id, found)))
    others = sum(not hasattr(sample, "loss_mask") for sample in found)
    if repeated or others:
        raise HookError(
            f"hook {_name(post_processor)}",
            got=f"{repeated} rows more than once, and {others} values that are no samples",
            expected="samples, each of them once",
            reason="every sampled token is trained in one row",
            remedy="change the rows in place, and return those that are to stay",
        )
    return found


def run_hook(hook: Picker | PostProcessor, samples: Sequence[Any], session_metadata: dict[str, Any]) -> list[Any]:
    """Call a picker or post-processor.

    Raises:
        HookError: it returned no list; a coroutine of an ``async`` function is none.
    """
    found: Any = hook(list(samples), session_metadata)
    if isinstance(found, list):
        return list(found)
    if inspect.iscoroutine(found):
        found.close()
    raise HookError(
        f"hook {_name(hook)}",
        got=f"a value of type {type(found).__name__} from it",
        expected="a list of samples from a plain function f(leaf_samples, session_metadata)",
        reason="the rows of the rollout are what it returns",
        remedy="return the samples, and do not write it as async",
    )


def _copies(samples: Sequence[Any]) -> list[dict[str, bytes]]:
    """Every field of every sample as bytes; what several samples refer to is read once."""
    known: dict[int, bytes] = {}

    def copied(value: Any) -> bytes:
        if id(value) not in known:
            known[id(value)] = _copy(value)
        return known[id(value)]

    return [{entry.name: copied(getattr(sample, entry.name)) for entry in fields(sample)} for sample in samples]


def _copy(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _not_a_selection(picker: Picker, got: str) -> HookError:
    return HookError(
        f"picker {_name(picker)}",
        got=got,
        expected="some of the samples that it was given, each at most once and as they were",
        reason="which turns are trained, and where, follows from the leaves that are kept",
        remedy="edit rows in a post-processor, which runs after ownership of shared turns is settled",
    )


def _name(hook: Any) -> str:
    return getattr(hook, "__name__", None) or shown(hook)
