"""Read and write JSON lines, plain, gzipped or zstd-compressed."""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, BinaryIO, cast

from miles_norm.errors import DumpError, format_rows
from miles_norm.extras import import_package

__all__ = ["iter_rows", "open_writer"]

# Small, because one chunk of a zstd stream can unfold into very many bytes.
_CHUNK = 1 << 14
_WHOLE_DUMP = "a whole dump in one line, not one row"
_JSON_NAMES = {list: "array", str: "string", bool: "boolean", type(None): "null"}


def iter_rows(
    file: BinaryIO, suffix: str, subject: str, progress: Callable[[int, int], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one row per line, line by line; blank lines are skipped. Bad lines raise once all have been seen.

    Args:
        file: The file as it is stored.
        suffix: ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst``.
        subject: What error messages are about.
        progress: Called with (stored bytes read, stored bytes in all) after each line.

    Raises:
        DumpError: A damaged stream, or lines that are no JSON object; all of them are in the message.
        MissingDependencyError: ``.jsonl.zst`` without the package zstandard.
    """
    size = os.fstat(file.fileno()).st_size
    bad: list[int] = []
    problem, number = "", 0
    try:
        for number, line in enumerate(_lines(file, suffix), start=1):
            try:
                row = _parse_row(line) if line.strip() else None
            except (ValueError, RecursionError, MemoryError) as error:
                problem = problem or _describe(error)
                bad.append(number)
                row = None
            if row is not None:
                yield row
            if progress is not None:
                progress(file.tell(), size)
    except (OSError, EOFError, zlib.error) as error:
        raise DumpError(
            subject,
            got=f"a stream that breaks off or is damaged after {number} whole lines: {error}",
            expected=f"a whole {suffix} file",
            reason="rows that are missing would change the statistics of their group",
            remedy="copy the file again, or let the step that writes it finish",
        ) from error
    if bad:
        also = f"; also {format_rows(bad[1:], 'line')}" if bad[1:] else ""
        raise DumpError(
            subject,
            got=f"{format_rows(bad[:1], 'line')}: {problem}{also}",
            expected="one JSON object per line, from field names to values, in UTF-8",
            reason="each line is one row",
            remedy="write one row per line" + (", or save the whole dump as .pt" if _WHOLE_DUMP in problem else ""),
        )


def open_writer(file: BinaryIO, suffix: str) -> AbstractContextManager[IO[bytes]]:
    """Return a stream that compresses into ``file`` as the suffix says; closing it leaves ``file`` open."""
    if suffix == ".jsonl.gz":
        # Neither name nor time goes into the header: the same rows give the same bytes.
        return cast(IO[bytes], gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0))
    if suffix == ".jsonl.zst":
        return cast(IO[bytes], _zstandard().ZstdCompressor().stream_writer(file, closefd=False))
    return nullcontext(file)


def _parse_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line.decode("utf-8").rstrip())
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {_JSON_NAMES.get(type(row), 'number')}, not an object")
    if "samples" in row and row.keys() <= {"rollout_id", "metadata", "samples"}:
        raise ValueError(_WHOLE_DUMP)
    return row


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "JSON nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, {error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON, {error.msg} at column {error.colno}"
    return str(error) or type(error).__name__


def _lines(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    if suffix == ".jsonl.gz":
        return iter(cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb")))
    if suffix == ".jsonl.zst":
        return _zstd_lines(file)
    return iter(file)


def _zstd_lines(file: BinaryIO) -> Iterator[bytes]:
    zstandard = _zstandard()
    decoder = zstandard.ZstdDecompressor().decompressobj()
    pending: list[bytes] = []  # the pieces of the present line
    inside = False  # a frame has begun and not ended
    while chunk := file.read(_CHUNK):
        while chunk:
            try:
                *ends, rest = decoder.decompress(chunk).split(b"\n")
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            for end in ends:
                yield b"".join([*pending, end])
                pending.clear()
            pending.append(rest)
            inside, chunk = not decoder.eof, decoder.unused_data
            if decoder.eof:
                decoder = zstandard.ZstdDecompressor().decompressobj()
    # The decoder itself takes a cut stream for a slow one.
    if inside:
        raise EOFError("the zstd frame has no end")
    yield b"".join(pending)


def _zstandard() -> Any:
    return import_package(
        "zstandard",
        "JSON lines compressed with zstd",
        reason="Python's standard library has no zstd",
        remedy="pip install 'miles-norm[zstd]', or use .jsonl or .jsonl.gz",
    )
