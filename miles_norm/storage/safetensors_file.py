"""Tables as safetensors: a few flat tensors per column; those of a file are mapped into memory, not read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from miles_norm.extras import import_package
from miles_norm.storage.table import Layout, StoredTable, read_layout, refuse

__all__ = ["kept_tensor", "load_safetensors", "safetensors_from_bytes", "safetensors_to_bytes", "save_safetensors"]

_LAYOUT, _HEAD = "miles_norm", "head"


def save_safetensors(table: StoredTable, file: BinaryIO) -> None:
    """Write a table.

    A column is the tensors ``FIELD.values``, ``FIELD.offsets`` (where its rows have lengths) and ``FIELD.valid`` (where
    some are None). The layout is in the header under ``miles_norm``; ``head`` is JSON as bytes.

    Raises:
        OSError: the disk is full.
        MissingDependencyError: the package safetensors is not installed.
    """
    package = _safetensors()
    tensors, layout = _tensors(table)
    try:
        package.torch.save_file(tensors, os.fspath(file.name), {_LAYOUT: layout})
    except package.SafetensorError as error:
        raise OSError(str(error)) from error


def safetensors_to_bytes(table: StoredTable) -> bytes:
    """What ``save_safetensors`` writes.

    Raises:
        MissingDependencyError: the package safetensors is not installed.
    """
    package = _safetensors()
    tensors, layout = _tensors(table)
    data: bytes = package.torch.save(tensors, {_LAYOUT: layout})
    return data


def _tensors(table: StoredTable) -> tuple[dict[str, Tensor], str]:
    """All tensors of a table, and its layout."""
    layout = Layout.of(table)
    head = np.frombuffer(bytearray(table.head.encode("ascii")), np.uint8)
    tensors: dict[str, Tensor] = {_HEAD: torch.from_numpy(head)}
    for one, column in zip(layout.columns, table.columns, strict=True):
        parts = {"values": column.values, "offsets": column.offsets, "valid": column.valid}
        tensors.update({f"{one.field}.{part}": value for part, value in parts.items() if value is not None})
    tensors.update({f"tensor.{number}": value for number, value in enumerate(table.tensors)})
    return _apart(tensors), layout.text()


def load_safetensors(
    path: Path, kind: str, subject: str, names: Collection[str] | None, finish: Callable[[StoredTable], Any]
) -> Any:
    """Map a table into memory and return what ``finish`` makes of it while the file is open.

    The tensors are views of the mapping: nothing is read before it is used, writing to them changes a private copy of
    the page, not the file.

    Args:
        path: Of the file.
        kind: ``train_data`` or ``rollout_dump``.
        subject: What errors are about.
        names: Columns to load; all by default.
        finish: Turns the table into its result.
    """
    with _safetensors().safe_open(os.fspath(path), framework="pt") as file:
        return finish(_table((file.metadata() or {}).get(_LAYOUT), file.keys(), file.get_tensor, kind, subject, names))


def safetensors_from_bytes(data: bytes, kind: str, subject: str, finish: Callable[[StoredTable], Any]) -> Any:
    """``load_safetensors`` for bytes, of which the tensors are copies."""
    tensors = _safetensors().torch.load(data)
    # The package checked the header, but hands out the tensors only.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    layout = header.get("__metadata__", {}).get(_LAYOUT)
    return finish(_table(layout, tensors, tensors.__getitem__, kind, subject, None))


def _table(
    text: str | None,
    present: Collection[str],
    get: Callable[[str], Tensor],
    kind: str,
    subject: str,
    names: Collection[str] | None,
) -> StoredTable:
    """The table in a set of tensors.

    Args:
        text: The layout, if there is one.
        present: Names of the tensors.
        get: Finds one by its name.
        kind: Of table that is expected.
        subject: What errors are about.
        names: Columns to load; all by default.
    """
    if text is None:
        refuse(subject, "a safetensors file that this library did not write", "read it with the program that wrote it")
    layout, present = read_layout(text, kind, subject), set(present)

    def tensor(name: str) -> Tensor | None:
        return _sound(get(name)) if name in present else None

    columns = []
    for one in layout.columns:
        if names is None or one.name in names:
            values, offsets = get(f"{one.field}.values"), tensor(f"{one.field}.offsets")
            if one.ragged != (offsets is not None):
                raise ValueError(f"column {one.name!r:.50} with offsets that do not fit its kind")
            columns.append(one.column(_sound(values), offsets, tensor(f"{one.field}.valid"), layout.num_rows))
    head = str(get(_HEAD).numpy().tobytes(), "ascii")
    return StoredTable(kind, layout.num_rows, columns, head, kept=lambda number: _sound(get(f"tensor.{number}")))


def kept_tensor(path: Path, number: int) -> Tensor:
    """A tensor that JSON cells refer to by number."""
    with _safetensors().safe_open(os.fspath(path), framework="pt") as file:
        return _sound(file.get_tensor(f"tensor.{number}"))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, no two of which share memory: the format has each of them once."""
    seen: set[int] = set()
    apart = {}
    for name, given in tensors.items():
        value = given.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if storage in seen else value
        seen.add(storage)
    return apart


def _sound(value: Tensor) -> Tensor:
    """The tensor; a bool one may only have the bytes 0 and 1."""
    if value.dtype == torch.bool and value.numel() and int(value.view(torch.uint8).max()) > 1:
        raise ValueError("a bool tensor with bytes other than 0 and 1")
    return value


def _safetensors() -> Any:
    package = import_package(
        "safetensors",
        "safetensors file",
        reason="it reads and writes this format",
        remedy="pip install 'miles-norm[safetensors]', or use another format",
    )
    import_module("safetensors.torch")  # which makes it an attribute of the package
    return package
