"""Which leaves become rows, and what is done to the rows: plain functions that Miles' session server can call as well.

All have the signature ``f(leaf_samples, session_metadata) -> list``. They read ``sample.metadata["leaf"]`` (node_id,
parent, path_node_ids, response_id), ``session_metadata["tree"]`` (nodes and leaves) and ``session_metadata["agent"]``
(what the agent returned), and set no field but ``loss_mask`` and ``reward``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from miles_norm.errors import HookError, MilesNormError, format_rows, shown

__all__ = [
    "assign_reward",
    "drop_retries",
    "keep_all",
    "leaf_rewards",
    "mask_ownership",
    "reading_hook_input",
    "row_order",
]


def keep_all(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Picker: every leaf.

    Raises:
        HookError: samples without a leaf descriptor; all are named, also by the other hooks.
    """
    with reading_hook_input(leaf_samples, session_metadata):
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
    with reading_hook_input(leaf_samples, session_metadata):
        latest: dict[Any, int] = {}
        for node in session_metadata["tree"]["nodes"]:
            if node["parent"] is not None:
                latest[node["parent"]] = max(node["id"], latest.get(node["parent"], -1))
        kept = [
            sample for sample in leaf_samples if _place(sample)["node_id"] >= latest.get(_place(sample)["parent"], -1)
        ]
        return sorted(kept, key=row_order, reverse=True)


def row_order(sample: Any) -> tuple[int, int, int]:
    """Number of turns, then commit of the last of them and of the leaf; all descend, as Miles has them."""
    leaf = _place(sample)
    return len(leaf["path_node_ids"]), leaf["path_node_ids"][-1], leaf["node_id"]


def mask_ownership(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Post-processor: a turn that several rows share stays trainable in that of the leaf that was committed first.

    Only among the rows that are given: call it after picking. Log-probs stay as they are.
    """
    with reading_hook_input(leaf_samples, session_metadata):
        if len({_place(sample)["node_id"] for sample in leaf_samples}) < 2:
            return list(leaf_samples)
        spans = {node["id"]: node["completion_span"] for node in session_metadata["tree"]["nodes"]}
        owner: dict[int, int] = {}
        for sample in leaf_samples:
            leaf = _place(sample)
            for node in leaf["path_node_ids"]:
                owner[node] = min(leaf["node_id"], owner.get(node, leaf["node_id"]))
        masks = []
        for sample in leaf_samples:
            leaf = _place(sample)
            masks.append(
                _masked(sample, [spans[node] for node in leaf["path_node_ids"] if owner[node] != leaf["node_id"]])
            )
        # Only now, so that an error leaves all rows as they were.
        for sample, mask in zip(leaf_samples, masks, strict=True):
            sample.loss_mask = mask
        return list(leaf_samples)


def _masked(sample: Any, spans: Sequence[Sequence[int]]) -> Any:
    """The loss mask of a row with 0 on the spans of its context; its own where there are none."""
    if not spans:
        return sample.loss_mask
    length = sample.response_length
    response_start = len(sample.tokens) - length
    mask: Any = [1] * length if sample.loss_mask is None else sample.loss_mask.copy()
    for span in spans:
        # A row that was cut ends before turns of its path.
        start, stop = (min(max(position - response_start, 0), length) for position in span)
        mask[start:stop] = 0 if isinstance(mask, np.ndarray) else [0] * (stop - start)
    return mask


def assign_reward(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Post-processor: the agent's ``reward`` to every row; without one the rows stay as they are."""
    with reading_hook_input(leaf_samples, session_metadata):
        agent = _agent(session_metadata)
        if "reward" in agent:
            for sample in leaf_samples:
                sample.reward = agent["reward"]
        return list(leaf_samples)


def leaf_rewards(leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Post-processor: a reward per leaf, from the agent's ``rewards``: response id of the leaf's last turn -> reward.

    All rows that come from the leaf get it, also one that ends before it. Rows of other leaves stay as they are; an
    entry of a leaf that was not picked, or of a turn that was continued, goes to no row.

    Raises:
        HookError: ``rewards`` that are no mapping, or a response id that no turn of the session has.
    """
    with reading_hook_input(leaf_samples, session_metadata):
        rewards = _agent(session_metadata).get("rewards")
        rewards = {} if rewards is None else rewards
        known = {node["response_id"] for node in session_metadata["tree"]["nodes"]}
        unknown = sorted(map(str, rewards.keys() - known)) if isinstance(rewards, Mapping) else []
        if unknown or not isinstance(rewards, Mapping):
            raise HookError(
                "rewards of the agent",
                got=f"{format_rows(unknown, 'response id')}, which no turn of the session has"
                if unknown
                else shown(rewards),
                expected="a mapping from ids of responses that this session returned to rewards",
                reason="a reward that reaches no row would leave its leaf unscored in silence",
                remedy="use the id of the chat completion that ended the leaf",
            )
        for sample in leaf_samples:
            response_id = _place(sample)["response_id"]
            if response_id in rewards:
                sample.reward = rewards[response_id]
        return list(leaf_samples)


def _place(sample: Any) -> Mapping[str, Any]:
    """The leaf descriptor of a row."""
    place: Mapping[str, Any] = sample.metadata["leaf"]
    return place


def _agent(session_metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    agent = session_metadata.get("agent")
    if agent is not None and not isinstance(agent, Mapping):
        raise HookError(
            "session_metadata['agent']",
            got=shown(agent),
            expected="a mapping, or None",
            reason="rewards are looked up in it by name",
            remedy="return a dict from the agent",
        )
    return agent or {}


@contextmanager
def reading_hook_input(leaf_samples: Any, session_metadata: Any) -> Iterator[None]:
    """Samples and metadata that lack what hooks read come out as one HookError that names them."""
    try:
        yield
    except MilesNormError:
        raise
    except Exception as error:
        bad = _unreadable(leaf_samples)
        got = f"{format_rows(bad, 'sample')} without some of it" if bad else f"{type(error).__name__}: {error}"[:300]
        if not isinstance(leaf_samples, Sequence):
            got = f"samples of type {type(leaf_samples).__name__}"
        raise HookError(
            "input of a hook",
            got=got,
            expected="a list of samples with tokens, response_length, loss_mask, reward and metadata['leaf'] (node_id, "
            "parent, path_node_ids, response_id), and a session_metadata['tree'] whose nodes have id, parent, "
            "completion_span and response_id",
            reason="which rows are kept and what is trained in them follows from these",
            remedy="call hooks with what the session server or assemble hands to them",
            rows=bad,
        ) from error


def _unreadable(leaf_samples: Any) -> list[int]:
    bad = []
    for number, sample in enumerate(leaf_samples if isinstance(leaf_samples, Sequence) else ()):
        place = getattr(sample, "metadata", None)
        place = place.get("leaf") if isinstance(place, Mapping) else None
        fits = (
            isinstance(place, Mapping)
            and {"node_id", "parent", "path_node_ids", "response_id"} <= place.keys()
            and isinstance(place["node_id"], int)
            and isinstance(place["parent"], int | None)
            and isinstance(place["path_node_ids"], Sequence)
            and len(place["path_node_ids"]) > 0
            and all(isinstance(node, int) for node in place["path_node_ids"])
            and all(hasattr(sample, name) for name in ("tokens", "response_length", "loss_mask", "reward"))
        )
        if not fits:
            bad.append(number)
    return bad
