"""Tell formats by their ending, open files that exist, and write files that appear whole or not at all."""

import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from miles_norm.errors import DumpError

__all__ = ["DUMP_ENDINGS", "REPORT_ENDINGS", "TRAIN_ENDINGS", "ending_of", "is_there", "open_existing", "replacing"]

TRAIN_ENDINGS = (".safetensors", ".parquet")
REPORT_ENDINGS = (".html",)
DUMP_ENDINGS = (".pt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".safetensors")


def ending_of(path: str | os.PathLike[str], endings: Sequence[str], subject: str, *, writing: bool = False) -> str:
    """The one of ``endings`` that the name of a file has, in any case.

    Raises:
        DumpError: it has none; what to do about it depends on whether the file is to be written.
    """
    name = Path(path).name
    for ending in endings:
        if name.lower().endswith(ending):
            return ending
    raise DumpError(
        subject,
        got=f"the file name {name!r}",
        expected=f"a name that ends in {' or '.join(filter(None, (', '.join(endings[:-1]), endings[-1])))}",
        reason="the ending says how the file is written",
        remedy="name the output with one of these endings"
        if writing
        else "give the file the ending of what it holds, or convert it to one of these formats",
    )


def is_there(path: Path) -> bool:
    """Whether a path leads to something; one that no file can have leads nowhere."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def open_existing(
    path: str | os.PathLike[str], subject: str, *, reason: str = "the rows are read from this file"
) -> BinaryIO:
    """Open a regular file that is not empty.

    Args:
        path: Of the file.
        subject: What it is, for the error.
        reason: What it is read for, for the error.

    Raises:
        DumpError: there is none, or it cannot be read.
    """
    expected = "a regular file that can be read and is not empty"
    try:
        # A named pipe would block in open; only regular files are opened.
        info = Path(path).stat()
        if not stat.S_ISREG(info.st_mode):
            got = "a folder" if stat.S_ISDIR(info.st_mode) else "a path that is no regular file"
        elif info.st_size == 0:
            got = "an empty file"
        else:
            return Path(path).open("rb")
        cause = None
    except (OSError, ValueError) as error:
        got, cause = getattr(error, "strerror", None) or str(error), error
    raise DumpError(subject, got=got, expected=expected, reason=reason, remedy="check the path") from cause


@contextmanager
def replacing(path: Path, subject: str) -> Iterator[BinaryIO]:
    """Write beside ``path`` and rename at the end, so that nobody ever reads half a file.

    Raises:
        DumpError: the folder is missing, full or not writable.
    """
    beside = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except DumpError:
        raise
    except (OSError, ValueError) as error:
        raise DumpError(
            subject,
            got=getattr(error, "strerror", None) or str(error),
            expected="a file name in an existing folder with room, where files may be made",
            reason="the dump is written beside its place first and then renamed",
            remedy="make the folder, or write elsewhere",
        ) from error
    finally:
        with suppress(OSError, ValueError):
            beside.unlink(missing_ok=True)
