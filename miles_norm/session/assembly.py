"""Trees of turns to rows: each sampled token once, as the engine returned it, in a row that knows its rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import ConfigError, SessionError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.completion import FinishReason
from miles_norm.session.hooks import Picker, PostProcessor, keep_all, mask_ownership, pick, process, row_order
from miles_norm.session.node import Node
from miles_norm.session.tree import TrajectoryForest

__all__ = ["assemble", "response_arrays", "session_metadata"]

_STATUS: dict[FinishReason, str] = {
    "stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted",
}  # fmt: skip


def assemble(
    forest: TrajectoryForest,
    base: Sample,
    picker: Picker = keep_all,
    post_processors: Sequence[PostProcessor] = (),
    *,
    agent: Mapping[str, Any] | None = None,
    max_seq_len: int | None = None,
) -> list[Sample]:
    """The training rows of one rollout's session.

    One row per leaf that the picker keeps, and one for each earlier part of its path that ends where the template did
    not extend and holds a turn which no leaf committed before has. A turn that several rows share is trainable in the
    row of the leaf that was committed first. Rows are ordered by number of turns, then commit, both descending.

    A row ends at a turn that was aborted, and before the first turn that would make it longer than ``max_seq_len``; a
    leaf none of whose turns fit has no row.

    Args:
        forest: The session.
        base: What all rows have in common: group_index, index, prompt, label, metadata and whatever else. Its
            ``rollout_id``, or else its ``index``, is the ``rollout_id`` of every row.
        picker: Chooses among the leaves, one sample each.
        post_processors: Called one after the other on the rows that come out.
        agent: What the agent returned, for the hooks.
        max_seq_len: Tokens that a row may have.

    Returns:
        Samples with arrays of their own: tokens int32 ``[T]``; loss_mask uint8 and rollout_log_probs float32
        ``[response_length]``, 0 on tokens that were not sampled; where the engine gave them, rollout_routed_experts
        int32 ``[T - 1, layers, top-k]``, of each token as it was first read. ``metadata["leaf"]`` is node_id, parent
        and response_id of the leaf, and path_node_ids, the turns from the start of the row.

    Raises:
        SessionError: no id for the rollout, or routed experts on some turns of a row only.
        HookError: a picker or post-processor that broke its contract.
        ConfigError: max_seq_len below 1.
    """
    _check(base, max_seq_len)
    leaf_paths, rows = _leaf_paths(forest), _Rows(base, max_seq_len)
    metadata = _metadata(forest, leaf_paths, agent)
    paths = {path[-1].seq: _Path(path, rows) for path in leaf_paths}
    kept = pick(picker, [path.sample for path in paths.values() if path.sample is not None], metadata)
    if forest.mismatches:
        taken: set[int] = set()
        for leaf in sorted(sample.metadata["leaf"]["node_id"] for sample in kept):
            kept += paths[leaf].earlier_rows(taken)
    kept = mask_ownership(sorted(kept, key=row_order, reverse=True), metadata)
    for post_processor in post_processors:
        kept = process(post_processor, kept, metadata)
    return kept


def session_metadata(forest: TrajectoryForest, agent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What hooks are told of the session: ``tree`` with its nodes and leaves, and ``agent``.

    ``completion_span`` says where a turn's completion stands among the tokens of its context. ``mismatches`` counts the
    turns that start a row although they continue another turn.
    """
    return _metadata(forest, _leaf_paths(forest), agent)


def _leaf_paths(forest: TrajectoryForest) -> list[list[Node]]:
    return [forest.path(leaf.seq) for leaf in forest.leaves()]


def _metadata(
    forest: TrajectoryForest, leaf_paths: Sequence[Sequence[Node]], agent: Mapping[str, Any] | None
) -> dict[str, Any]:
    nodes = [
        {
            "id": node.seq,
            "parent": node.parent,
            "seq": node.seq,
            "truncated": node.truncated,
            "starts_row": node.starts_row,
            "committed_at": node.committed_at,
            "completion_span": [node.prompt_length, node.context_length],
            "num_tokens": node.context_length,
            "response_id": node.completion.response_id,
        }
        for node in forest.nodes
    ]
    leaves = [{"node_id": path[-1].seq, "path_node_ids": [node.seq for node in path]} for path in leaf_paths]
    tree = {"nodes": nodes, "leaves": leaves, "mismatches": forest.mismatches}
    return {"tree": tree} if agent is None else {"tree": tree, "agent": dict(agent)}


def response_arrays(
    gaps: Sequence[int], log_probs: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Loss mask and log-probs of a response from those of its completions, 0 between them.

    Args:
        gaps: Tokens between the completion before, or the start of the response, and each completion.
        log_probs: Of the tokens of each completion.

    >>> mask, log_probs = response_arrays([0, 1], [np.array([-1.0, -2.0]), np.array([-3.0, -4.0])])
    >>> mask.tolist(), log_probs.tolist()
    ([1, 1, 0, 1, 1], [-1.0, -2.0, 0.0, -3.0, -4.0])
    """
    lengths = [
        length for gap, of_completion in zip(gaps, log_probs, strict=True) for length in (gap, len(of_completion))
    ]
    mask = np.repeat(np.tile(np.array([0, 1], np.uint8), len(gaps)), lengths)
    values = np.zeros(len(mask), np.float32)
    values[mask == 1] = np.concatenate(log_probs)
    return mask, values


class _Path:
    """A leaf and the parts of its path, each of which can be a row."""

    def __init__(self, path: Sequence[Node], rows: _Rows) -> None:
        self._leaf, self._rows = path[-1], rows
        self._parts = [part for part in _parts(path) if rows.fits(part)]
        self.sample = rows.row(self._parts[-1], self._leaf) if self._parts else None
        """What a picker sees of the leaf: the last part that fits."""

    def earlier_rows(self, taken: set[int]) -> Iterator[Sample]:
        """Rows of the other parts that hold a turn which is not ``taken``; then all turns are."""
        for part in self._parts:
            turns = {node.seq for node in part}
            if part is not self._parts[-1] and not turns <= taken:
                yield self._rows.row(part, self._leaf)
            taken |= turns


class _Rows:
    """Makes rows of consecutive turns."""

    def __init__(self, base: Sample, max_seq_len: int | None) -> None:
        self._base = replace(base, rollout_id=base.index if base.rollout_id is None else base.rollout_id)
        self._limit = np.inf if max_seq_len is None else max_seq_len

    def fits(self, part: Sequence[Node]) -> bool:
        return part[0].context_length <= self._limit

    def row(self, part: Sequence[Node], leaf: Node) -> Sample:
        """The row of turns each of which continues the tokens of the one before; the first one fits."""
        turns, status = self._cut(part)
        pieces, log_probs, versions = [], [], []
        for turn in turns:
            completion = turn.completion
            pieces += [turn.new_prompt_token_ids, completion.token_ids]
            log_probs.append(completion.log_probs)
            if completion.weight_version is not None:
                versions.append(completion.weight_version)
        # Every second piece is a prompt, and the first one of them stands before the response.
        mask, values = response_arrays([0, *map(len, pieces[2::2])], log_probs)
        place = {
            "node_id": leaf.seq,
            "parent": leaf.parent,
            "path_node_ids": [node.seq for node in part],
            "response_id": leaf.completion.response_id,
        }
        return replace(
            self._base,
            tokens=np.concatenate(pieces),
            response_length=len(mask),
            loss_mask=mask,
            rollout_log_probs=values,
            rollout_routed_experts=_joined_experts(turns),
            weight_versions=versions,
            status=status,
            metadata={**self._base.metadata, "leaf": place},
            extra=dict(self._base.extra),
        )

    def _cut(self, part: Sequence[Node]) -> tuple[list[Node], str]:
        """The turns that the row holds, and its status."""
        turns: list[Node] = []
        for node in part:
            if node.context_length > self._limit:
                return turns, "truncated"
            turns.append(node)
            if node.completion.finish_reason == "abort":
                break
        return turns, _STATUS[turns[-1].completion.finish_reason]


def _parts(path: Sequence[Node]) -> list[list[Node]]:
    """A path, divided before each turn that starts a row."""
    parts: list[list[Node]] = []
    for node in path:
        if node.starts_row:
            parts.append([])
        parts[-1].append(node)
    return parts


def _joined_experts(turns: Sequence[Node]) -> NDArray[np.int32] | None:
    """Routed experts ``[T - 1, layers, top-k]`` of a row; each turn holds those beyond the one before."""
    found = [turn.completion.routed_experts for turn in turns]
    experts = [value for value in found if value is not None]
    if not experts:
        return None
    lacking = [turn.seq for turn, value in zip(turns, found, strict=True) if value is None]
    shapes = sorted({value.shape[1:] for value in experts})
    if lacking or len(shapes) > 1:
        raise SessionError(
            f"routed experts of turns {turns[0].seq} to {turns[-1].seq}",
            got=f"none on {format_rows(lacking, 'turn')}" if lacking else f"layers and top-k {shapes}",
            expected="experts of one shape on every turn of a row, or on none",
            reason="the trainer replays the routing of the whole row",
            remedy="ask the engine for routed experts with every request, or with none",
        )
    return np.concatenate(experts)


def _check(base: Sample, max_seq_len: int | None) -> None:
    if base.rollout_id is None and base.index is None:
        raise SessionError(
            "base sample",
            got="neither rollout_id nor index",
            expected="an id of the rollout",
            reason="the rows of a rollout are told from others by it",
            remedy="set index to the number of the rollout in the batch, or rollout_id to any id",
        )
    if max_seq_len is not None and max_seq_len < 1:
        raise ConfigError(
            "max_seq_len",
            got=shown(max_seq_len),
            expected="a whole number from 1, or None",
            reason="a row has at least one token",
            remedy="leave it out for rows of any length",
        )
