"""The journal: order, group commits, room given back, and files that are not what they should be."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.errors import JournalError
from miles_norm.session.store import Journal, JournalRecord, SyncMode


def written(path: Path, records: list[JournalRecord], sync: SyncMode = "normal") -> None:
    """Append one after another, close."""

    async def run() -> None:
        journal = Journal(path, sync=sync)
        for record in records:
            await journal.append(record.session_id, record.kind, record.payload)
        await journal.close()

    asyncio.run(run())


def replayed(path: Path) -> list[JournalRecord]:
    journal = Journal(path)
    records = list(journal.replay())
    asyncio.run(journal.close())
    return records


@pytest.mark.parametrize("sync", ["full", "normal", "off"])
def test_records_come_back_in_order_over_several_runs(tmp_path: Path, sync: SyncMode) -> None:
    records = [JournalRecord(f"s{k % 3}", "turn", bytes([k]) * k) for k in range(20)]
    path = tmp_path / "journal"
    assert replayed(path) == []
    written(path, records[:9], sync)
    assert replayed(path) == records[:9]
    written(path, records[9:], sync)
    assert replayed(path) == records


@given(
    payloads=st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=5), st.binary(max_size=40)), max_size=20),
    purged=st.sets(st.sampled_from("abc")),
)
def test_replay_is_what_was_appended_and_not_purged(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[tuple[str, str, bytes]], purged: set[str]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "file"
    records = [JournalRecord(*payload) for payload in payloads]

    async def run() -> None:
        journal = Journal(path, sync="off")
        await asyncio.gather(*(journal.append(r.session_id, r.kind, r.payload) for r in records))
        await journal.purge(purged)
        await journal.close()

    asyncio.run(run())
    assert replayed(path) == [record for record in records if record.session_id not in purged]


def test_concurrent_writers_share_commits_and_each_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    statements: list[str] = []

    async def run() -> None:
        journal = Journal(path)
        journal._connection.set_trace_callback(statements.append)

        async def writer(name: int) -> None:
            for number in range(20):
                await journal.append(f"s{name}", "turn", bytes([number]))

        await asyncio.gather(*(writer(name) for name in range(100)))
        await journal.close()

    asyncio.run(run())
    records = replayed(path)
    assert len(records) == 2_000
    # 100 records wait at any time, so that two commits for each of the 20 rounds are about what there is.
    assert 20 <= statements.count("COMMIT") < 1_000
    for name in range(100):
        assert [r.payload[0] for r in records if r.session_id == f"s{name}"] == list(range(20))


def test_purging_gives_much_room_back_and_reuses_little(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def run() -> list[int]:
        journal, sizes = Journal(path, sync="off"), []
        for purged in ([], ["s0"], [f"s{k}" for k in range(1, 9)]):
            await journal.purge(purged)
            if not sizes:
                await asyncio.gather(*(journal.append(f"s{k % 10}", "turn", bytes(10_000)) for k in range(2_000)))
            sizes.append(path.stat().st_size)
        await journal.close()
        return sizes

    written, little, much = asyncio.run(run())
    # 10 sessions of 2 MB each; the first one is not worth 16 MiB, it and eight more are.
    assert written > 16_000_000
    assert little >= written
    assert much < 4_000_000
    assert {record.session_id for record in replayed(path)} == {"s9"}


def test_a_cancelled_writer_stops_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path / "journal")
        tasks = [asyncio.create_task(journal.append("s", "turn", bytes([k]))) for k in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[3]
        await asyncio.gather(*(task for task in tasks if task is not tasks[3]))
        await journal.append("s", "turn", b"last")
        await journal.close()

    asyncio.run(run())
    payloads = [record.payload for record in replayed(tmp_path / "journal")]
    assert payloads[-1] == b"last"
    assert {bytes([k]) for k in range(10) if k != 3} <= set(payloads)


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path / "journal")
        await journal.close()
        await journal.close()
        with pytest.raises(JournalError, match=r"got: +it is closed"):
            await journal.append("s", "turn", b"")

    asyncio.run(run())


def test_one_process_or_server_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    with pytest.raises(
        JournalError, match=r"(?s)database is locked \(SQLITE_BUSY\).*another process holds the journal"
    ):
        Journal(path)
    asyncio.run(journal.close())
    assert replayed(path) == []


def test_files_that_are_no_journal_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_bytes(b"a text file, longer than a header of SQLite; " * 50)
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE records (session_id TEXT)")
        connection.commit()
    for path, match in (
        (text, r"file is not a database \(SQLITE_NOTADB\)"),
        (other, r"a database with application id 0x0 and format 0"),
        (tmp_path / "no" / "folder", r"unable to open database file \(SQLITE_CANTOPEN\)"),
        (tmp_path, rf"journal {tmp_path}\n  got:      what is no regular file\n  expected: the path of a file"),
    ):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(JournalError, match=match):
            Journal(path)
        assert (path.read_bytes() if path.is_file() else None) == before
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "other.db"}


def test_a_damaged_file_says_so_and_gives_what_lies_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = [JournalRecord("s", "turn", bytes([65 + k]) * 20_000) for k in range(20)]
    written(path, records)
    data = bytearray(path.read_bytes())
    # One bit of a payload: pages of SQLite have no checksums, records have.
    data[data.index(b"K" * 3_000)] ^= 1
    path.write_bytes(data)
    journal = Journal(path)
    found = []
    with pytest.raises(JournalError, match="record 11, of session s, has another checksum"):
        found.extend(journal.replay())
    asyncio.run(journal.close())
    # All pages but the first are gone.
    path.write_bytes(data[:4096] + bytes(len(data) - 4096))
    journal = Journal(path)
    with pytest.raises(JournalError, match=r"(?s)malformed.*the file is damaged"):
        list(journal.replay())
    asyncio.run(journal.close())


def test_what_cannot_be_written_leaves_the_journal_usable(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path / "journal")
        with pytest.raises(JournalError, match=r"surrogates not allowed"):
            await journal.append("\ud800", "turn", b"")
        await journal.append("s", "turn", b"1")
        await journal.close()

    asyncio.run(run())
    assert replayed(tmp_path / "journal") == [JournalRecord("s", "turn", b"1")]


@pytest.mark.parametrize("path", [None, 3, b"journal", "", ".", "/dev/null", "x\0y", ":memory:", "folder/:memory:"])
def test_paths_that_are_no_file(path: object) -> None:
    """SQLite would take some of them for a database in memory, which survives nothing."""
    with pytest.raises(JournalError, match=r"journal .*\n  got: .*\n  expected: the path of a file"):
        Journal(path)  # type: ignore[arg-type]


def test_a_sync_mode_that_there_is_not(tmp_path: Path) -> None:
    """SQLite takes any word, and does something else."""
    with pytest.raises(JournalError, match="sync 'fsync'\n  expected: one of full, normal, off"):
        Journal(tmp_path / "journal", sync="fsync")  # type: ignore[arg-type]
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize(
    ("column", "value"),
    [("payload", None), ("payload", "text"), ("payload", 7), ("session_id", b"s"), ("kind", None), ("kind", 2.5)],
)
def test_values_of_another_type(tmp_path: Path, column: str, value: object) -> None:
    """What another program wrote, past the types that the schema asks for."""
    path = tmp_path / "journal"
    written(path, [JournalRecord("s", "turn", b"a"), JournalRecord("s", "turn", b"b")])
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE records RENAME TO old")
        connection.execute("CREATE TABLE records (position INTEGER PRIMARY KEY, session_id, kind, payload, checksum)")
        connection.execute("INSERT INTO records SELECT * FROM old")
        connection.execute(f"UPDATE records SET {column} = ? WHERE position = 2", (value,))
    journal = Journal(path)
    given = journal.replay()
    assert next(given).payload == b"a"
    with pytest.raises(JournalError, match="got:      record 2 is of the types "):
        next(given)
    asyncio.run(journal.close())
