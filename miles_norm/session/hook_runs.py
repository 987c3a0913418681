"""Hooks are code of others: they are called here, and what they may not do is found here."""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import HookError, SessionError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.hooks import reading_hook_input

__all__ = ["Picker", "PostProcessor", "SampledTokens", "pick", "process", "run_hook"]

Picker = Callable[[list[Any], dict[str, Any]], list[Any]]
PostProcessor = Callable[[list[Any], dict[str, Any]], list[Any]]


def pick(picker: Picker, leaf_samples: Sequence[Any], session_metadata: Mapping[str, Any]) -> list[Any]:
    """Let a picker choose among leaves; it may select and order, and nothing else.

    Raises:
        HookError: it invented, repeated or edited a sample, edited the metadata, or returned no list; the message names
            leaf and field.
        SessionError: samples or metadata that cannot be compared with what they were.
    """
    with reading_hook_input(leaf_samples, session_metadata):
        numbers = {id(sample): number for number, sample in enumerate(leaf_samples)}
        names = [sample.metadata["leaf"]["node_id"] for sample in leaf_samples]
        metadata = dict(session_metadata)
    before, metadata_before = _copies(leaf_samples), _copy(metadata, "session_metadata")
    picked = run_hook(picker, leaf_samples, metadata)
    try:
        after, metadata_after = _copies(leaf_samples), _copy(metadata, "session_metadata")
    except SessionError as error:
        raise _not_a_selection(picker, f"it edited what is now {error.got}") from error
    edited = [
        f"the {', '.join(changed)} of leaf {name}"
        for name, old, new in zip(names, before, after, strict=True)
        if (changed := [field for field in old if new[field] != old[field]])
    ]
    if metadata_after != metadata_before:
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


@dataclass(frozen=True, eq=False, slots=True)
class _Row:
    """What a row was before any post-processor saw it."""

    sample: Sample
    tokens: NDArray[Any]
    mask: NDArray[Any]
    turns: list[int]


class SampledTokens:
    """Which tokens of which rows were sampled, as post-processors may train them.

    Args:
        rows: As they are before the first post-processor.
        spans: Of each turn, where its completion begins and ends in its context.
    """

    def __init__(self, rows: Iterable[Sample], spans: Mapping[int, tuple[int, int]]) -> None:
        self._spans = spans
        self._rows: dict[tuple[int, int], _Row] = {}
        for sample in rows:
            place = sample.metadata["leaf"]
            turns = list(place["path_node_ids"])
            row = _Row(sample, np.array(sample.tokens), np.array(sample.loss_mask), turns)
            self._rows[place["node_id"], turns[-1]] = row
        # The samples are held, so that no other object takes the id of one.
        self._known = {id(row.sample): row for row in self._rows.values()}

    def problems(self, found: Sequence[Sample]) -> list[str]:
        """What is wrong with the masks of the rows that a post-processor returned; nothing if there is no change."""
        if all(self._unchanged(sample) for sample in found):
            return []
        problems: dict[int, str] = {}
        trained: list[NDArray[np.int64]] = []
        for number, sample in enumerate(found):
            keys = self._trained(sample)
            if isinstance(keys, str):
                problems[number] = keys
            else:
                trained.append(keys)
        named = [f"row {number}: {problem}" for number, problem in list(problems.items())[:10]]
        if len(problems) > 10:
            named.append(f"{len(problems) - 10} more rows")
        tokens, times = np.unique(np.concatenate([np.empty(0, np.int64), *trained]), return_counts=True)
        twice = sorted(set((tokens[times > 1] >> 32).tolist()))
        return named + [f"{format_rows(twice, 'turn')} trainable in several rows"] * bool(twice)

    def _unchanged(self, sample: Sample) -> bool:
        row = self._known.get(id(sample))
        return (
            row is not None
            and sample.response_length == len(row.mask)
            and np.array_equal(np.asarray(sample.loss_mask), row.mask)
            and np.array_equal(np.asarray(sample.tokens), row.tokens)
        )

    def _trained(self, sample: Sample) -> NDArray[np.int64] | str:
        """Turn (upper half) and position (lower half) of each trainable token of a row, or what is wrong with them."""
        length, tokens = sample.response_length, np.asarray(sample.tokens)
        if isinstance(length, bool) or not isinstance(length, int):
            return f"response_length {shown(length)}"
        mask = np.ones(max(length, 0)) if sample.loss_mask is None else np.asarray(sample.loss_mask)
        if mask.shape != (length,) or tokens.ndim != 1 or len(tokens) < length or not np.isin(mask, (0, 1)).all():
            return f"a loss_mask that is not 0 or 1 for each of its {length} response tokens"
        positions = len(tokens) - length + np.flatnonzero(mask)
        if sample.remove_sample or not len(positions):
            return np.empty(0, np.int64)
        row = self._known.get(id(sample)) or self._by_place(sample)
        if row is None:
            return "trainable tokens, and it is none of the rows that the session has"
        keys = np.full(max(len(row.tokens), len(tokens)), -1, np.int64)
        for turn in row.turns:
            start, stop = self._spans[turn]
            keys[start:stop] = (turn << 32) + np.arange(start, stop)
        # Where the tokens are not those that were sampled, nothing may be trained.
        same = min(len(row.tokens), len(tokens))
        keys[:same][row.tokens[:same] != tokens[:same]] = -1
        trained: NDArray[np.int64] = keys[positions]
        strangers = int((trained < 0).sum())
        return f"{strangers} tokens trainable that were not sampled in its turns" if strangers else trained

    def _by_place(self, sample: Sample) -> _Row | None:
        """The row that a sample was made of, by its leaf descriptor."""
        try:
            place = sample.metadata["leaf"]
            return self._rows.get((place["node_id"], place["path_node_ids"][-1]))
        except Exception:  # noqa: BLE001  # Whatever the metadata is now, it names no row.
            return None


def process(
    post_processor: PostProcessor, samples: Sequence[Any], session_metadata: dict[str, Any], sampled: SampledTokens
) -> list[Any]:
    """Let a post-processor change and drop rows. Of the mask it may take away, and move what several rows share.

    Raises:
        HookError: it repeated a row, made tokens trainable that were not sampled, or the same ones in several rows; or
            returned something else than rows, or no list. All rows are named.
    """
    found = run_hook(post_processor, samples, session_metadata)
    repeated = len(found) - len(set(map(id, found)))
    others = sum(not isinstance(sample, Sample) for sample in found)
    if repeated or others:
        raise HookError(
            f"hook {_name(post_processor)}",
            got=f"{repeated} rows more than once, and {others} values that are no samples",
            expected="samples, each of them once",
            reason="every sampled token is trained in one row",
            remedy="change the rows in place, and return those that are to stay",
        )
    try:
        problems = sampled.problems(found)
    except Exception as error:  # noqa: BLE001  # Making arrays of whatever the rows hold now runs its code.
        problems = [f"tokens and masks that make no arrays: {error}"[:300]]
    if problems:
        raise HookError(
            f"post-processor {_name(post_processor)}",
            got="; ".join(problems),
            expected="masks of 0 and 1 in which each sampled token is trainable in one row at most, and no other is",
            reason="the loss is over what the policy sampled, once",
            remedy="only take away from a mask; to move a shared turn, mask it in one row and train it in the other",
        )
    return found


def run_hook(hook: Picker | PostProcessor, samples: Sequence[Any], session_metadata: dict[str, Any]) -> list[Any]:
    """Call a picker or post-processor. What it raises itself comes out as it is.

    Raises:
        HookError: it is no function, or returned no list; a coroutine of an ``async`` function is none.
    """
    found: Any = hook(list(samples), session_metadata) if callable(hook) else hook
    if callable(hook) and isinstance(found, list):
        return list(found)
    if inspect.iscoroutine(found):
        found.close()
    raise HookError(
        f"hook {_name(hook)}",
        got=f"a value of type {type(found).__name__}" + (" from it" if callable(hook) else ""),
        expected="a list of samples from a plain function f(leaf_samples, session_metadata)",
        reason="the rows of the rollout are what it returns",
        remedy="return the samples, and do not write it as async",
    )


def _copies(samples: Sequence[Any]) -> list[dict[str, bytes]]:
    """Every field of every sample as bytes; what several samples refer to is read once."""
    known: dict[int, bytes] = {}

    def copied(value: Any, name: str) -> bytes:
        if id(value) not in known:
            known[id(value)] = _copy(value, name)
        return known[id(value)]

    others = [number for number, sample in enumerate(samples) if not is_dataclass(sample)]
    if others:
        raise _incomparable("samples", f"{format_rows(others, 'sample')} that are no dataclasses")
    return [
        {entry.name: copied(getattr(sample, entry.name), f"{entry.name} of the samples") for entry in fields(sample)}
        for sample in samples
    ]


def _copy(value: Any, name: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # Pickling runs code of whatever the value holds.
        raise _incomparable(name, f"what cannot be pickled: {type(error).__name__}: {error}"[:300]) from error


def _incomparable(name: str, got: str) -> SessionError:
    return SessionError(
        name,
        got=got,
        expected="values that can be pickled, such as numbers, strings, arrays, lists and dicts",
        reason="that a picker edits nothing is found by comparing what it was given with what it leaves",
        remedy="keep locks, clients, functions and the like out of the rows and of what the agent returns",
    )


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
