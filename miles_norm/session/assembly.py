"""Trees of turns to rows: each sampled token once, as the engine returned it, in a row that knows its rollout."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from miles_norm.errors import SessionError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.hook_runs import Picker, PostProcessor, SampledTokens, pick, process
from miles_norm.session.hooks import keep_all, mask_ownership, row_order
from miles_norm.session.node import Node
from miles_norm.session.path_rows import LeafPath, RowMaker
from miles_norm.session.rendering import Renderer
from miles_norm.session.tree import TrajectoryForest, check_forest

__all__ = ["assemble", "session_metadata"]

logger = logging.getLogger("miles_norm")


def assemble(
    forest: TrajectoryForest,
    base: Sample,
    picker: Picker = keep_all,
    post_processors: Sequence[PostProcessor] = (),
    *,
    agent: Mapping[str, Any] | None = None,
    max_seq_len: int | None = None,
    renderer: Renderer | None = None,
) -> list[Sample]:
    """The training rows of one rollout's session.

    One row per leaf that the picker keeps, and one for each earlier part of its path that holds a turn which no leaf
    committed before has. A part ends where the template did not extend, and at a turn that was aborted: what continues
    it has its tokens in the prompt. A turn that several rows share is trainable in the row of the leaf that was
    committed first. So every turn of a kept leaf is trainable in one row, but for those with more than ``max_seq_len``
    tokens. Rows are ordered by number of turns, then commit, both descending.

    A row ends before the first turn that would make it longer than ``max_seq_len``; a leaf none of whose turns fit has
    no row, which is logged as a warning.

    Args:
        forest: The session.
        base: What all rows have in common: group_index, index, prompt, label, metadata and whatever else. Its
            ``rollout_id``, or else its ``index``, is the ``rollout_id`` of every row.
        picker: Chooses among the leaves, one sample each.
        post_processors: Called one after the other on the rows that come out.
        agent: What the agent returned, for the hooks.
        max_seq_len: Tokens that a row may have.
        renderer: Makes the text of each response; without it, ``response`` is that of ``base``.

    Returns:
        Samples with arrays of their own: tokens int32 ``[T]``; loss_mask uint8 and rollout_log_probs float32
        ``[response_length]``, 0 on tokens that were not sampled; where the engine gave them, rollout_routed_experts
        int32 ``[T - 1, layers, top-k]``, of each token as it was first read. ``metadata["leaf"]`` is node_id, parent
        and response_id of the leaf that the row comes from; path_node_ids, the turns that it holds, the last of which
        is the leaf unless the row ends before it; and left_out_node_ids, the turns of the leaf's path that are in no
        row, since they have more than ``max_seq_len`` tokens.

    Raises:
        SessionError: no id for the rollout, routed experts on some turns of a row only, arguments of another kind, or
            values that a picker could edit unseen.
        HookError: a picker or post-processor that broke its contract.
        ConfigError: max_seq_len below 1.
        RenderingError: a renderer that returns no text.
    """
    _check_session(forest, agent)
    _check(base, post_processors)
    rows = RowMaker(base, max_seq_len, renderer)
    leaf_paths = _leaf_paths(forest)
    metadata = _metadata(forest, leaf_paths, agent)
    paths = {path[-1].seq: LeafPath(path, rows) for path in leaf_paths}
    _warn_of_leaves_without_a_row(list(paths.values()), rows.rollout_id, max_seq_len)
    kept = pick(picker, [path.sample for path in paths.values() if path.sample is not None], metadata)
    leaves = sorted(sample.metadata["leaf"]["node_id"] for sample in kept)
    if any(paths[leaf].parts > 1 for leaf in leaves):
        taken: set[int] = set()
        for leaf in leaves:
            kept += paths[leaf].earlier_rows(taken)
    kept = mask_ownership(sorted(kept, key=row_order, reverse=True), metadata)
    if post_processors:
        sampled = SampledTokens(kept, {node.seq: (node.prompt_length, node.context_length) for node in forest.nodes})
        for post_processor in post_processors:
            kept = process(post_processor, kept, metadata, sampled)
    return kept


def session_metadata(forest: TrajectoryForest, agent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What hooks are told of the session: ``tree`` with its nodes and leaves, and ``agent``.

    ``completion_span`` says where a turn's completion stands among the tokens of its context. ``mismatches`` counts the
    turns that start a row although they continue another turn.

    Raises:
        SessionError: no forest, or an agent that is no mapping.
    """
    _check_session(forest, agent)
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


def _warn_of_leaves_without_a_row(paths: Sequence[LeafPath], rollout_id: Any, max_seq_len: int | None) -> None:
    without = [path.leaf.seq for path in paths if path.sample is None]
    if without:
        logger.warning(
            "rollout %s: no row for the leaves at %s: all that leads to them has more than max_seq_len = %s tokens",
            rollout_id, format_rows(without, "turn"), max_seq_len,
        )  # fmt: skip


def _check_session(forest: Any, agent: Any) -> None:
    check_forest(forest)
    if not isinstance(agent, Mapping | None):
        raise _unfit("agent", shown(agent), "a mapping, or None", "hooks look rewards up in it by name")


def _check(base: Any, post_processors: Any) -> None:
    if isinstance(post_processors, str | bytes) or not isinstance(post_processors, Sequence):
        raise _unfit("post_processors", shown(post_processors), "a list of functions", "they are called in their order")
    if not isinstance(base, Sample):
        raise _unfit("base sample", shown(base), "a Sample", "all rows have its fields in common")
    wrong = [name for name in ("metadata", "extra") if not isinstance(getattr(base, name), Mapping)]
    if wrong:
        got = "; ".join(f"{name} {shown(getattr(base, name))}" for name in wrong)
        raise _unfit(
            "base sample", got, "mappings, which may be empty", "each row has a copy, and its leaf in metadata"
        )
    named = base.index if base.rollout_id is None else base.rollout_id
    if isinstance(named, bool) or not isinstance(named, Hashable) or named is None or named != named:
        raise SessionError(
            "base sample",
            got="neither rollout_id nor index" if named is None else f"the id {shown(named)}",
            expected="an id of the rollout: a number or a string",
            reason="the rows of a rollout are told from others by it",
            remedy="set index to the number of the rollout in the batch, or rollout_id to any id",
        )


def _unfit(subject: str, got: str, expected: str, reason: str) -> SessionError:
    return SessionError(subject, got=got, expected=expected, reason=reason, remedy=f"pass {expected} as {subject}")
