"""Stored columns as Arrow arrays, sharing their memory where Arrow has the type."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.storage.table import TEXT_CELLS, ColumnLayout, StoredColumn
from miles_norm.train_data.ragged_build import from_numpy
from miles_norm.train_data.ragged_checks import running

__all__ = ["arrow_column", "arrow_type", "stored_column"]

_ARROW_NAMES = {
    torch.bool: "bool_", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64",
    torch.bfloat16: "uint16",  # its bits: Arrow has no such type
}  # fmt: skip


def arrow_type(pa: Any, layout: ColumnLayout) -> Any:
    """Text, a number, or a large list of numbers; trailing dimensions are flattened into the list."""
    if layout.cell in TEXT_CELLS:
        return pa.large_string()
    number = getattr(pa, _ARROW_NAMES[layout.dtype])()
    return pa.large_list(pa.field("element", number, nullable=False)) if _is_list(layout) else number


def arrow_column(pa: Any, layout: ColumnLayout, column: StoredColumn) -> Any:
    """The Arrow array of some rows."""
    kind, rows = arrow_type(pa, layout), len(column.values) if column.offsets is None else len(column.offsets) - 1
    values = _host(column.values)
    absent = None if column.valid is None else ~column.valid.cpu().numpy()
    if not _is_list(layout) and layout.cell not in TEXT_CELLS:
        return pa.array(values, type=kind, mask=absent)
    width = int(np.prod(layout.shape, dtype=np.int64))
    offsets = torch.arange(rows + 1) if column.offsets is None else column.offsets.cpu()
    if layout.cell in TEXT_CELLS:
        bitmap = None if absent is None else pa.array(~absent).buffers()[1]
        buffers = [bitmap, pa.py_buffer(offsets.contiguous().numpy()), pa.py_buffer(values)]
        return pa.Array.from_buffers(kind, rows, buffers)
    return pa.LargeListArray.from_arrays(
        pa.array((offsets * width).numpy()),
        pa.array(values, type=kind.value_type),
        type=kind,
        mask=None if absent is None else pa.array(absent),
    )


def stored_column(pa: Any, layout: ColumnLayout, chunks: Any, num_rows: int) -> StoredColumn:
    """The stored column of all chunks of an Arrow column.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException, SampleError: a column that ``arrow_column`` did not write.
    """
    kind = arrow_type(pa, layout)
    if chunks.type != kind:
        chunks = chunks.cast(kind)
    chunks.validate(full=True)
    valid = None
    if chunks.null_count:
        valid = torch.from_numpy(np.concatenate([chunk.is_valid().to_numpy(False) for chunk in chunks.chunks]))
    if layout.cell in TEXT_CELLS or _is_list(layout):
        parts = [_text_parts(chunk) if layout.cell in TEXT_CELLS else _list_parts(chunk) for chunk in chunks.chunks]
        values = _tensor([part[0] for part in parts], layout.dtype)
        lengths = [from_numpy(np.diff(part[1])) for part in parts]
        offsets = running(torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64))
    else:
        empty = pa.scalar(0).cast(kind)
        values = _tensor([chunk.fill_null(empty).to_numpy(False) for chunk in chunks.chunks], layout.dtype)
        return layout.column(values, None, valid, num_rows)
    width = int(np.prod(layout.shape, dtype=np.int64))
    if layout.cell == "tensor":
        return layout.column(values.reshape(num_rows, *layout.shape), None, valid, num_rows)
    if bool((offsets % max(width, 1) != 0).any()):
        raise ValueError(f"column {layout.name!r:.50} has lists that do not fill the shape {list(layout.shape)}")
    return layout.column(values.reshape(-1, *layout.shape), offsets // width, valid, num_rows)


def _is_list(layout: ColumnLayout) -> bool:
    return layout.ragged or bool(layout.shape)


def _host(values: Tensor) -> np.ndarray[Any, Any]:
    flat = values.detach().cpu().contiguous().reshape(-1)
    return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()


def _tensor(parts: list[np.ndarray[Any, Any]], dtype: torch.dtype) -> Tensor:
    parts = [part for part in parts if part.size]
    if not parts:
        return torch.empty(0, dtype=dtype)
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    # Arrow's memory is read-only; the columns of a caller are not.
    tensor = torch.from_numpy(whole if whole.flags.writeable else whole.copy())
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


def _list_parts(chunk: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if not len(chunk):
        return np.empty(0), np.zeros(1, np.int64)
    offsets = chunk.offsets.to_numpy(False)
    inner = chunk.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if inner.null_count:
        raise ValueError("a list with an entry that is null")
    return inner.to_numpy(False), offsets


def _text_parts(chunk: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    _, bounds, data = chunk.buffers()
    if not len(chunk):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(bounds, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    whole = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return whole[offsets[0] : offsets[-1]], offsets
