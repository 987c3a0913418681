"""Rows and turns as bytes: safetensors for rows, one line of JSON for a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_norm.errors import DumpError, format_rows, shown
from miles_norm.samples import Sample
from miles_norm.session.node import Node
from miles_norm.session.tree import TrajectoryForest
from miles_norm.storage import typed_json
from miles_norm.storage.dump_files import rows_from_bytes, rows_to_bytes
from miles_norm.storage.plain_values import NotPlainError, plain_mapping
from miles_norm.storage.table import reading

__all__ = ["decode_node", "decode_rows", "encode_node", "encode_rows"]


def encode_rows(rows: Sequence[Sample], metadata: Mapping[str, Any] | None = None) -> bytes:
    """Rows as a rollout dump in safetensors: written to a file, ``read_dump`` reads it.

    Arrays keep their dtypes and shapes, ids their types; a column is one flat tensor, whatever the number of rows.

    Args:
        rows: May be none.
        metadata: Of the session; plain values and arrays.

    Raises:
        DumpError: a value that has no form in a file; the message names rows and field.
        MissingDependencyError: without the package safetensors.
    """
    others = [number for number, row in enumerate(rows) if not isinstance(row, Sample)] if _is_list(rows) else []
    if others or not _is_list(rows) or not isinstance(metadata, Mapping | None):
        got = f"{format_rows(others)}, no Sample" if others else shown(rows if not _is_list(rows) else metadata)
        raise _unwritable("rows of a session", got, others)
    try:
        plain = [plain_mapping(row.to_dict(), keep_arrays=True) for row in rows]
        return rows_to_bytes(plain, plain_mapping(metadata or {}, keep_arrays=True))
    except NotPlainError as error:
        bad = list(getattr(error, "rows", ()))
        raise _unwritable("rows of a session", f"{format_rows(bad)}, {error}" if bad else str(error), bad) from error


def decode_rows(data: bytes) -> tuple[list[Sample], dict[str, Any]]:
    """The rows and the metadata that ``encode_rows`` was given.

    Raises:
        DumpError: bytes that are cut, damaged or of another kind.
        MissingDependencyError: without the package safetensors.

    >>> import numpy as np
    >>> rows, metadata = decode_rows(encode_rows([Sample(index="a", tokens=np.array([1, 2], np.int32))], {"turns": 1}))
    >>> rows[0].index, rows[0].tokens, metadata
    ('a', array([1, 2], dtype=int32), {'turns': 1})
    """
    rows, metadata = rows_from_bytes(data, "rows of a session")
    return [Sample.from_dict(row) for row in rows], metadata


def encode_node(turn: Node) -> bytes:
    """A turn, added or only prepared, as one line of ASCII for a journal; it holds what the turn adds.

    Raises:
        DumpError: no turn, or one whose messages or tools hold what no file can.
    """
    if not isinstance(turn, Node):
        raise _unwritable("record of a turn", shown(turn))
    try:
        return typed_json.dumps(turn.record()).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise _unwritable("record of a turn", f"{type(error).__name__}: {error}"[:300]) from error


def decode_node(forest: TrajectoryForest, data: bytes) -> Node:
    """Add a turn from its ``encode_node`` to a forest that holds those before it.

    Raises:
        DumpError: bytes that are cut or damaged, or of a turn that is not the next one.
    """
    with reading("record of a turn"):
        return forest.replay(typed_json.loads(data.decode("ascii")))


def _is_list(rows: Any) -> bool:
    return isinstance(rows, Sequence) and not isinstance(rows, str | bytes)


def _unwritable(subject: str, got: str, rows: Sequence[int] = ()) -> DumpError:
    return DumpError(
        subject,
        got=got,
        expected="Samples, or a turn, of numbers, strings, booleans, None, arrays, and lists and dicts of them",
        reason="other values cannot be read back without the code that made them",
        remedy="convert these values to plain ones before, rows in a post-processor",
        rows=rows,
    )
