"""An append-only journal of sessions: what has been acknowledged is there after a crash.

Records of many tasks are written by one thread, all that are waiting in one transaction of SQLite's write-ahead log,
so that the cost of making them durable is shared. Whoever takes a journal also takes None, for sessions in memory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from miles_norm.errors import JournalError, shown
from miles_norm.session.journal_errors import checked_path, journal_error, refused

__all__ = ["Journal", "JournalRecord", "SyncMode"]

SyncMode = Literal["full", "normal", "off"]

_APPLICATION_ID, _FORMAT = 0x6D6E6A6C, 1
_BATCH = 512
_GIVEN_BACK = 16 * 2**20
"""Free bytes in the file that are worth the tens of milliseconds of giving them back, in which nothing is written."""
_SCHEMA = f"""
    PRAGMA application_id = {_APPLICATION_ID};
    PRAGMA user_version = {_FORMAT};
    CREATE TABLE records (
        position INTEGER PRIMARY KEY, session_id TEXT NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL,
        checksum INTEGER NOT NULL
    );
    CREATE INDEX records_of_session ON records (session_id);
"""
_INSERT = "INSERT INTO records (session_id, kind, payload, checksum) VALUES (?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One record: opaque bytes of a kind, about a session."""

    session_id: str
    kind: str
    payload: bytes


@dataclass(frozen=True, eq=False, slots=True)
class _Order:
    """What the writing thread is asked to do, and whom it tells."""

    rows: tuple[tuple[str, str, bytes, int], ...]
    purged: tuple[str, ...]
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class Journal:
    """An open journal file; one process holds it at a time.

    ``append`` returns when the record is committed. Every mode survives a killed process. ``full`` also survives a
    power cut, ``normal`` may lose the last commits in one, and ``off`` may lose the whole file. A record whose
    ``append`` did not return, because the process died or the disk failed, may or may not be there.

    Args:
        path: Of the file, made if it does not exist; SQLite keeps ``-wal`` beside it.
        sync: What a commit waits for.

    Raises:
        JournalError: the file cannot be opened or made, is held by another process, or is no journal.

    >>> import tempfile
    >>> async def write(path):
    ...     journal = Journal(path)
    ...     await asyncio.gather(*(journal.append("s1", "turn", bytes([k])) for k in range(3)))
    ...     await journal.close()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(write(f"{folder}/sessions.journal"))
    ...     journal = Journal(f"{folder}/sessions.journal")
    ...     print([record.payload for record in journal.replay()])
    ...     asyncio.run(journal.close())
    [b'\\x00', b'\\x01', b'\\x02']
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: SyncMode = "normal") -> None:
        self.path = checked_path(path)
        if sync not in get_args(SyncMode):
            raise refused(path, f"sync {shown(sync)}", f"one of {', '.join(get_args(SyncMode))}")
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        try:
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise journal_error(self.path, error, "opened") from None
        try:
            self._prepare(sync)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, sqlite3.Error):
                raise journal_error(self.path, error, "opened") from None
            raise

    def _prepare(self, sync: SyncMode) -> None:
        run = self._connection.execute
        # Held until the connection closes or the process dies, so that two servers never write one journal.
        run("PRAGMA locking_mode = EXCLUSIVE")
        found = [run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        empty = found == [0, 0] and run("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        if not empty and found != [_APPLICATION_ID, _FORMAT]:
            raise JournalError(
                f"journal {self.path}",
                got=f"a database with application id {found[0]:#x} and format {found[1]}",
                expected=f"application id {_APPLICATION_ID:#x} and format {_FORMAT}",
                reason="it belongs to another program, or to another version of this one",
                remedy="name another file",
            )
        run("PRAGMA auto_vacuum = INCREMENTAL")
        run("PRAGMA journal_mode = WAL")
        run(f"PRAGMA synchronous = {sync.upper()}")
        run("BEGIN IMMEDIATE")
        if empty:
            for statement in _SCHEMA.split(";"):
                run(statement)
        run("COMMIT")

    def replay(self) -> Iterator[JournalRecord]:
        """All records in the order in which they were acknowledged; to be taken before anything is appended.

        Raises:
            JournalError: the file is damaged; the records before the damage have been given.
        """
        try:
            rows = self._connection.execute("SELECT * FROM records ORDER BY position")
            for position, session_id, kind, payload, checksum in rows:
                # Columns of SQLite hold values of any type, whatever the schema says.
                if not (isinstance(session_id, str) and isinstance(kind, str) and isinstance(payload, bytes)):
                    types = ", ".join(type(value).__name__ for value in (session_id, kind, payload))
                    raise sqlite3.DatabaseError(f"record {position} is of the types {types}")
                if zlib.crc32(payload) != checksum:
                    raise sqlite3.DatabaseError(f"record {position}, of session {session_id}, has another checksum")
                yield JournalRecord(session_id, kind, payload)
        except sqlite3.Error as error:
            raise journal_error(self.path, error, "read") from error

    async def append(self, session_id: str, kind: str, payload: bytes) -> None:
        """Write a record; it is durable, as far as the sync mode goes, when this returns.

        Records of a session keep the order of the calls.

        Raises:
            JournalError: it could not be written, or the journal is closed.
        """
        await self._order(rows=((session_id, kind, payload, zlib.crc32(payload)),))

    async def purge(self, session_ids: Collection[str]) -> None:
        """Remove all records of the sessions. Their room is used again, and given back to the disk where it is much.

        Raises:
            JournalError: as ``append``; nothing is removed then.
        """
        await self._order(purged=tuple(session_ids))

    async def close(self) -> None:
        """Write what is waiting, then close the file."""
        if self._closed:
            return
        self._closed = True
        self._orders.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._connection.close()

    async def _order(self, rows: tuple[tuple[str, str, bytes, int], ...] = (), purged: tuple[str, ...] = ()) -> None:
        if self._closed:
            raise journal_error(self.path, sqlite3.ProgrammingError("it is closed"), "written")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._orders.put(_Order(rows, purged, future, loop))
        await future

    def _write(self) -> None:
        """Body of the thread: take all orders that are waiting, commit them together, tell those who wait."""
        closing = False
        while not closing:
            batch = [self._orders.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _BATCH and batch[-1] is not None:
                    batch.append(self._orders.get_nowait())
            closing = batch[-1] is None
            orders = [order for order in batch if order is not None]
            failure: Exception | None = None
            try:
                self._commit(orders)
            except Exception as error:  # noqa: BLE001  # Whatever it is, those who wait must hear of it.
                failure = error
            for order in orders:
                # An error of its own for each: they are raised in different tasks.
                told = None if failure is None else journal_error(self.path, failure, "written")
                with contextlib.suppress(RuntimeError):  # The loop was closed, and nobody waits any more.
                    order.loop.call_soon_threadsafe(_settle, order.future, told)

    def _commit(self, orders: list[_Order]) -> None:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            for order in orders:
                self._connection.executemany(_INSERT, order.rows)
                for session_id in order.purged:
                    run("DELETE FROM records WHERE session_id = ?", (session_id,))
            run("COMMIT")
        except BaseException:
            # SQLite has rolled back already after some errors, a full disk among them.
            if self._connection.in_transaction:
                run("ROLLBACK")
            raise
        if any(order.purged for order in orders) and self._free_bytes() >= _GIVEN_BACK:
            # The records are gone already: what cannot be given back now will be reused.
            with contextlib.suppress(sqlite3.Error):
                # execute would take one step of it, which is one page.
                self._connection.executescript("PRAGMA incremental_vacuum")
                run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _free_bytes(self) -> int:
        """Room in the file that holds no record."""
        run = self._connection.execute
        return int(run("PRAGMA freelist_count").fetchone()[0] * run("PRAGMA page_size").fetchone()[0])


def _settle(future: asyncio.Future[None], failure: JournalError | None) -> None:
    if future.done():  # Its task was cancelled.
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
