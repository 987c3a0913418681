"""The turns on the way to a leaf as rows, each of turns that continue the tokens of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import SessionError, format_rows
from miles_norm.samples import Sample
from miles_norm.session.completion import FinishReason
from miles_norm.session.node import Node
from miles_norm.session.rendering import Renderer, check_renderer, decoded
from miles_norm.session.turn_checks import check_count

__all__ = ["LeafPath", "RowMaker", "response_arrays"]

_STATUS: dict[FinishReason, str] = {
    "stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted",
}  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class _Part:
    """Turns of a path that can be a row: from ``first`` to before ``stop``, behind those from ``start`` on."""

    start: int
    """The turn whose prompt was rendered afresh; up to ``first`` turns are part of the prompt."""
    first: int
    stop: int


class LeafPath:
    """A leaf and the parts of its path, each of which can be a row.

    Args:
        path: From the start of the tree to the leaf.
        rows: Makes the rows.
    """

    def __init__(self, path: Sequence[Node], rows: RowMaker) -> None:
        self.leaf = path[-1]
        self._path, self._rows = path, rows
        self._parts = [part for part in _parts(path) if rows.fits(path[part.first])]
        self.sample = rows.row(path, self._parts[-1]) if self._parts else None
        """What a picker sees of the leaf: the last part that fits."""

    @property
    def parts(self) -> int:
        """How many rows the path would be."""
        return len(self._parts)

    def earlier_rows(self, taken: set[int]) -> Iterator[Sample]:
        """Rows of the other parts that hold a turn which is not ``taken``; then all turns are."""
        for part in self._parts:
            turns = {node.seq for node in self._path[part.first : part.stop] if self._rows.fits(node)}
            if part is not self._parts[-1] and not turns <= taken:
                yield self._rows.row(self._path, part)
            taken |= turns


class RowMaker:
    """Makes rows of consecutive turns.

    Args:
        base: What all rows have in common.
        max_seq_len: Tokens that a row may have.
        renderer: Makes the text of a response.

    Raises:
        ConfigError: max_seq_len below 1.
        RenderingError: a renderer that is none.
    """

    def __init__(self, base: Sample, max_seq_len: int | None, renderer: Renderer | None) -> None:
        if max_seq_len is not None:
            check_count(max_seq_len, "max_seq_len", "a row has at least one token")
        if renderer is not None:
            check_renderer(renderer)
        self.rollout_id = base.index if base.rollout_id is None else base.rollout_id
        self._base = replace(base, rollout_id=self.rollout_id)
        self._limit, self._renderer = max_seq_len, renderer

    def fits(self, turn: Node) -> bool:
        """Whether a row may hold the turn and all that comes before it."""
        return self._limit is None or turn.context_length <= self._limit

    def row(self, path: Sequence[Node], part: _Part) -> Sample:
        """The row of a part whose first turn fits."""
        read, planned = path[part.start : part.first], path[part.first : part.stop]
        turns = planned if self._limit is None else [turn for turn in planned if self.fits(turn)]
        pieces = [ids for turn in (*read, *turns) for ids in (turn.new_prompt_token_ids, turn.completion.token_ids)]
        mask, log_probs = response_arrays(
            [0, *(len(turn.new_prompt_token_ids) for turn in turns[1:])],
            [turn.completion.log_probs for turn in turns],
        )
        tokens = np.concatenate(pieces)
        leaf, extra = path[-1], dict(self._base.extra)
        place = {
            "node_id": leaf.seq,
            "parent": leaf.parent,
            "path_node_ids": [turn.seq for turn in turns],
            "response_id": leaf.completion.response_id,
            "left_out_node_ids": [] if self._limit is None else [turn.seq for turn in path if not self.fits(turn)],
        }
        response = self._base.response
        if self._renderer is not None:
            response = decoded(self._renderer, tokens[len(tokens) - len(mask) :])
        versions = [turn.completion.weight_version for turn in turns]
        return replace(
            self._base,
            tokens=tokens,
            response=response,
            response_length=len(mask),
            loss_mask=mask,
            rollout_log_probs=log_probs,
            rollout_routed_experts=_joined_experts([*read, *turns]),
            weight_versions=[version for version in versions if version is not None],
            status="truncated" if len(turns) < len(planned) else _STATUS[turns[-1].completion.finish_reason],
            metadata={**self._base.metadata, "leaf": place},
            extra=extra,
        )


def _parts(path: Sequence[Node]) -> list[_Part]:
    """A path, divided before each turn that starts a row and behind each that was aborted."""
    first = [
        number
        for number, node in enumerate(path)
        if node.starts_row or path[number - 1].completion.finish_reason == "abort"
    ]
    parts, start = [], 0
    for begin, stop in zip(first, [*first[1:], len(path)], strict=True):
        start = begin if path[begin].starts_row else start
        parts.append(_Part(start, begin, stop))
    return parts


def _joined_experts(turns: Sequence[Node]) -> NDArray[np.int32] | None:
    """Routed experts ``[T - 1, layers, top-k]`` of a row; each turn holds those beyond the one before."""
    found: list[Any] = [turn.completion.routed_experts for turn in turns]
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
