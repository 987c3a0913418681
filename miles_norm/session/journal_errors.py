"""What can be wrong with a journal, in words."""

from __future__ import annotations

import contextlib
from pathlib import Path

from miles_norm.errors import JournalError, shown

__all__ = ["checked_path", "journal_error", "refused"]

_REASONS = {
    "SQLITE_FULL": (
        "the disk is full, and this was not written",
        "make room; the journal then goes on by itself",
    ),
    "SQLITE_BUSY": ("another process holds the journal", "stop the other server, or name another file"),
    "SQLITE_CANTOPEN": ("the folder is missing or may not be written", "make the folder, or name another file"),
    "SQLITE_CORRUPT": ("the file is damaged", "restore it from a copy, or move it away and start anew"),
    "SQLITE_NOTADB": ("the file is no journal", "name another file"),
    "SQLITE_IOERR": ("what could not be written must not be acknowledged", "see what the system says about the disk"),
}


def journal_error(path: Path, error: Exception, done: str) -> JournalError:
    """What SQLite, or anything below it, says of a file that could not be opened, read or written."""
    code = getattr(error, "sqlite_errorname", "")
    reason, remedy = _REASONS.get("_".join(code.split("_")[:2]), _REASONS["SQLITE_IOERR"])
    made = JournalError(
        f"journal {path}",
        got=f"{error}" + (f" ({code})" if code else ""),
        expected=f"a file that can be {done}",
        reason=reason,
        remedy=remedy,
    )
    made.__cause__ = error
    return made


def checked_path(path: object) -> Path:
    """The path of a file on a disk: SQLite has names for what is none.

    Raises:
        JournalError: it is no such path, or of a folder or device.
    """
    got = shown(path)
    try:
        checked = Path(path)  # type: ignore[arg-type]  # what it refuses is named below
        usable = "\0" not in str(checked) and checked.name not in ("", ":memory:")
        with contextlib.suppress(OSError):  # SQLite has better words for what cannot be reached.
            if usable and checked.exists() and not checked.is_file():
                usable, got = False, "what is no regular file"
    except TypeError:
        usable = False
    if not usable:
        raise refused(path, got, "the path of a file, which may be a new one")
    return checked


def refused(path: object, got: str, expected: str) -> JournalError:
    """A journal that is not opened: its path or a setting of it is none."""
    named = isinstance(path, str | Path) and str(path).isprintable()
    return JournalError(
        f"journal {path if named else shown(path)}",
        got=got,
        expected=expected,
        reason="what is acknowledged has to be on a disk, in the way that was asked for",
        remedy="name a file; for sessions in memory alone leave the journal out",
    )
