"""What an audit keeps of a row beside the columns of normalization: sizes, a strip of its mask, its way in the tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_norm.errors import SampleError

__all__ = ["STRIP", "RowNotes", "mask_strip"]

STRIP = 120
"""Most cells of a strip: more are not told apart on a screen."""

_LONGEST_PATH = 256
Path = tuple[int | str, ...]


@dataclass
class RowNotes:
    """One entry per row, appended while rows are read; the rows themselves are not kept."""

    tokens: list[int | None] = field(default_factory=list)
    """Tokens of prompt and response; None where the row has none."""
    lengths: list[int | None] = field(default_factory=list)
    """Tokens of the response."""
    strips: list[str] = field(default_factory=list)
    """``mask_strip`` of the loss mask."""
    paths: list[Path] = field(default_factory=list)
    """Nodes of the session's tree from a root to the leaf of the row; empty where the row does not say."""
    digests: list[int | None] = field(default_factory=list)
    """Equal where tokens and mask are; None for a row without tokens."""

    def reading(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The same rows, noted as they pass."""
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise SampleError(
                    f"row {number}",
                    got=f"a value of type {type(row).__name__}",
                    expected="a dict from field names to values",
                    reason="an audit reads the rows of dumps",
                    remedy="pass sample.to_dict() for a Sample",
                    rows=[number],
                )
            self._note(row)
            yield row

    def _note(self, row: Mapping[str, Any]) -> None:
        tokens, mask, length = row.get("tokens"), row.get("loss_mask"), row.get("response_length")
        self.tokens.append(_size(tokens))
        length = length if type(length) is int and length >= 0 else _size(mask)
        self.lengths.append(length)
        self.strips.append(mask_strip(mask, length or 0))
        self.paths.append(_path(row.get("metadata")))
        # Two turns of a session that say the same were sampled twice; they are no copies.
        self.digests.append(_digest(tokens, mask, self.paths[-1]))


def mask_strip(mask: Any, length: int) -> str:
    """The mask in at most 120 digits: each is the share of trainable tokens in its part, 0 none to 9 all of them.

    A response of up to 120 tokens has one digit per token. Without a mask all tokens are trainable. What is no mask
    gives an empty strip: normalization has an error for it.

    >>> mask_strip([0, 0, 1, 1, 0], 5), mask_strip(None, 3)
    ('00990', '999')
    """
    if mask is None:
        return "9" * min(length, STRIP)
    values = _mask_values(mask)
    if values is None or not len(values):
        return ""
    if len(values) <= STRIP:
        return (values * 9 + ord("0")).astype(np.uint8).tobytes().decode()
    edges = np.arange(STRIP + 1) * len(values) // STRIP
    sums, sizes = np.add.reduceat(values, edges[:-1], dtype=np.int64), np.diff(edges)
    # A part with one trainable token of thousands is not empty, and one that lacks a token is not full.
    digits = np.where(sums == 0, 0, np.where(sums == sizes, 9, (sums * 9 // sizes).clip(1, 8)))
    return (digits + ord("0")).astype(np.uint8).tobytes().decode()


def _mask_values(mask: Any) -> np.ndarray[Any, Any] | None:
    """Zeros and ones as uint8; None for anything else."""
    with suppress(TypeError, ValueError, OverflowError):
        # A list of small integers is a buffer at once; numpy would look at each entry for its type.
        values = np.frombuffer(bytearray(mask), np.uint8) if isinstance(mask, list) else np.asarray(mask)
        if values.ndim == 1 and values.dtype.kind in "biu" and (not len(values) or values.max() <= 1):
            return values.astype(np.uint8, copy=False)
    return None


def _size(values: Any) -> int | None:
    if isinstance(values, list):
        return len(values)
    with suppress(TypeError):
        return None if isinstance(values, str | bytes | dict) else len(values)
    return None


def _path(metadata: Any) -> Path:
    """``metadata["leaf"]["path_node_ids"]``, as Miles' session server writes it; files hold anything."""
    leaf = metadata.get("leaf") if isinstance(metadata, dict) else None
    nodes = leaf.get("path_node_ids") if isinstance(leaf, dict) else None
    if not isinstance(nodes, list | tuple) or len(nodes) > _LONGEST_PATH or len(set(map(str, nodes))) < len(nodes):
        return ()
    return tuple(nodes) if all(type(node) in (int, str) for node in nodes) else ()


def _digest(tokens: Any, mask: Any, path: Path) -> int | None:
    if not _size(tokens):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        return hash((_content(tokens), None if mask is None else _content(mask), path))
    return None


def _content(values: Any) -> bytes:
    return array("q", values).tobytes() if isinstance(values, list) else np.asarray(values, dtype=np.int64).tobytes()
