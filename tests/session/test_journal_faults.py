"""Servers as real processes with real journals: killed, out of disk, started twice. What was acknowledged is there."""

import asyncio
import json
import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conversations import assistant, user
from processes import Process, running
from scripted import CHAT, Api, connected, served

from miles_norm.session.store import Journal

pytestmark = pytest.mark.anyio

SERVER = Path(__file__).parent / "session_server.py"


@contextmanager
def server(journal: Path, **settings: Any) -> Iterator[tuple[Process, str]]:
    with running(SERVER, json.dumps({"port": 0, "journal": str(journal), **settings})) as process:
        address = process.line()
        assert address.startswith("http://127.0.0.1:")
        yield process, address


Turns = list[tuple[str, str, str]]
"""Questions, replies and response ids that were acknowledged."""


def conversation(turns: Turns) -> list[dict[str, Any]]:
    return [message for question, said, _ in turns for message in (user(question), assistant(said))]


async def talk(api: Api, session: str, turns: Turns) -> None:
    """Go on with a conversation until the server is gone."""
    while True:
        question = f"turn {len(turns)} of {session}"
        try:
            answer = await api.turn(session, [*conversation(turns), user(question)])
        except (aiohttp.ClientError, OSError):
            return
        turns.append((question, answer["choices"][0]["message"]["content"], answer["id"]))


async def talk_until_killed(process: Process, api: Api, sessions: dict[str, Turns], acknowledged: int) -> None:
    talks = [asyncio.create_task(talk(api, session, turns)) for session, turns in sessions.items()]
    while sum(map(len, sessions.values())) < acknowledged:
        await asyncio.sleep(0.005)
    process.signal(signal.SIGKILL)
    assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    await asyncio.gather(*talks)


async def check_all_there(api: Api, sessions: dict[str, Turns]) -> None:
    """Every acknowledged turn, and at most one more of each session, whose answer never left; it is added."""
    for number, (session, turns) in enumerate(sessions.items()):
        nodes = (await api.show(session))["tree"]["nodes"]
        ids = [node["response_id"] for node in nodes]
        assert ids[: len(turns)] == [response_id for *_, response_id in turns]
        assert [node["parent"] for node in nodes] == [None, *range(len(nodes) - 1)][: len(nodes)]
        if len(nodes) > len(turns):
            question = f"turn {len(turns)} of {session}"
            turns.append((question, f"You said: {question}", ids[-1]))
        assert len(nodes) == len(turns)
        if turns and number % 8 == 0:
            # A conversation is one row, whose text and trained part are what was said.
            (row,) = await api.rows(session)
            text = CHAT.render(conversation(turns), add_generation_prompt=False)
            assert CHAT.decode(row.tokens.tolist()) == text.removesuffix("\n")
            trained = row.tokens[-row.response_length :][row.loss_mask == 1]
            assert CHAT.decode(trained.tolist()) == "".join(f"{said}<|im_end|>" for _, said, _ in turns)


async def test_a_server_that_is_killed_during_200_sessions_has_every_acknowledged_turn(tmp_path: Path) -> None:
    """Twice: the sessions go on after the first restart."""
    journal = tmp_path / "journal"
    with server(journal) as (process, address):
        async with connected(address) as api:
            names = await asyncio.gather(*(api.create() for _ in range(200)))
            sessions: dict[str, Turns] = {name: [] for name in names}
            await talk_until_killed(process, api, sessions, acknowledged=500)
    with server(journal) as (process, address):
        async with connected(address) as api:
            await check_all_there(api, sessions)
            await talk_until_killed(process, api, sessions, acknowledged=1_500)
    async with served(journal=str(journal)) as api:
        await check_all_there(api, sessions)
        assert (await api.metrics())["sessions"] == 200


def limit_files(pid: int, size: int) -> None:
    """The largest file that a process may write: what is beyond it is refused as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def test_a_disk_that_is_full(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with server(journal) as (process, address):
        async with connected(address) as api:
            sessions = [await api.create() for _ in range(4)]
            limit_files(process.pid, 3_000_000)
            acknowledged: dict[str, list[str]] = {session: [] for session in sessions}
            refusals = []

            async def fill(session: str) -> None:
                for number in range(100):
                    status, body = await api.try_turn(session, [user(f"{number} " + "x" * 5_000)])
                    if status == 200:
                        acknowledged[session].append(body["id"])
                    else:
                        refusals.append((status, body["error"]))

            await asyncio.gather(*map(fill, sessions))
            assert sum(map(len, acknowledged.values())) > 10
            assert len(refusals) > 10
            for status, error in refusals:
                assert status == 507
                assert (error["type"], error["code"]) == ("journal_error", "JournalError")
                assert f"journal {journal}" in error["message"]
            # Nothing was acknowledged that was not written, nothing is there that was not acknowledged.
            for session in sessions:
                shown = await api.show(session)
                assert [node["response_id"] for node in shown["tree"]["nodes"]] == acknowledged[session]
                assert shown["in_flight"] == 0
            limit_files(process.pid, 1)
            assert (await api.call("POST", "/sessions"))[0] == 507
            # What cannot be removed from the journal stays.
            assert (await api.call("DELETE", f"/sessions/{sessions[0]}"))[0] == 507
            assert await api.turns(sessions[0]) == acknowledged[sessions[0]]
            assert (await api.metrics())["sessions"] == 4
            # Once there is room it goes on by itself.
            limit_files(process.pid, resource.RLIM_INFINITY)
            for session in sessions:
                acknowledged[session].append((await api.turn(session, [user("more")]))["id"])
            assert (await api.call("DELETE", f"/sessions/{sessions[0]}"))[0] == 204
        process.signal(signal.SIGKILL)
    async with served(journal=str(journal)) as api:
        assert (await api.metrics())["sessions"] == 3
        for session in sessions[1:]:
            assert await api.turns(session) == acknowledged[session]


async def test_two_servers_do_not_share_a_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with served(journal=str(journal)) as api:
        with running(SERVER, json.dumps({"port": 0, "journal": str(journal)})) as second:
            refusal = await asyncio.to_thread(second.line)
            assert refusal.startswith(f"JournalError: journal {journal}")
            assert "another process holds the journal" in refusal
            assert second.wait() == 0
        await api.create()


async def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("text, and more text, that is no database" * 10)
    with pytest.raises(OSError, match="the file is no journal"):
        async with served(journal=str(tmp_path / "journal")):
            pass


MADE = ("s", "session", b'{"metadata": {}, "created_at": 0}')


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ([("s", "turn", b"{}")], "record 0 of the journal"),
        ([("s", "session", b"[]")], "session 's'"),
        ([("s", "session", b"[" * 100_000)], "record 0 of the journal\n  got: .*RecursionError"),
        ([("s", "session", b'{"metadata": 3, "created_at": 0}')], "ValueError: metadata 3, created_at 0"),
        ([("s", "session", b'{"metadata": {}, "created_at": "now"}')], "ValueError: metadata {}, created_at 'now'"),
        ([("s", "session", b'{"metadata": {}, "created_at": Infinity}')], "created_at inf"),
        ([MADE, MADE], "record 1 of the journal\n  got: .*it is there already"),
        ([MADE, ("s", "note", b"")], "record 1 of the journal\n  got: .*'note' of session 's'.*unknown"),
        ([MADE, ("s", "turn", b"[" * 100_000)], "record 1 of the journal"),
        ([MADE, ("s", "turn", b"3")], "record 1 of the journal"),
        ([MADE, ("s", "turn", b"")], "record 1 of the journal"),
        ([("s", "session", b'{"metadata": {}, "created_at": 0}'), ("s", "turn", b'{"parent": 3}')], "record 1 of the"),
        ([("s", "session", b'{"metadata": {}, "created_at": 0}'), ("s", "turn", b"\xff")], "record 1 of the journal"),
    ],
)
async def test_records_that_make_no_session(tmp_path: Path, records: list[Any], match: str) -> None:
    journal = Journal(tmp_path / "journal")
    for session, kind, payload in records:
        await journal.append(session, kind, payload)
    await journal.close()
    with pytest.raises(OSError, match=match) as caught:
        async with served(journal=str(tmp_path / "journal")):
            pass
    assert "every acknowledged turn has to be there again" in str(caught.value)


async def test_a_server_says_what_it_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "miles_norm")
    journal = str(tmp_path / "journal")
    async with served(journal=journal) as api:
        sessions = [await api.create() for _ in range(2)]
        for number in range(3):
            await api.turn(sessions[number % 2], [user(str(number))])
    assert "restored" not in caplog.text
    async with served(journal=journal):
        assert f"restored 2 sessions with 3 turns from {journal}" in caplog.messages


async def test_a_limit_that_was_lowered_does_not_lose_turns(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    async with served(journal=journal) as api:
        session, _ = await api.create(), await api.create()
        ids = [(await api.turn(session, [user(str(number))]))["id"] for number in range(3)]
    async with served(journal=journal, max_nodes=2, max_sessions=1) as api:
        assert await api.turns(session) == ids
        assert (await api.try_turn(session, [user("more")]))[0] == 409
        assert (await api.call("POST", "/sessions"))[0] == 429


async def test_racing_turns_are_replayed_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    """Turns name their parents by number: another order would make another tree."""
    journal = str(tmp_path / "journal")
    async with served(journal=journal) as api:
        session = await api.create(task="sums")

        async def branch(number: int) -> None:
            messages: list[Any] = [user(f"question {number}")]
            for turn in range(4):
                answer = await api.turn(session, messages)
                messages += [answer["choices"][0]["message"], user(f"then {turn}?")]

        await asyncio.gather(*map(branch, range(20)))
        before, rows = await api.show(session), await api.rows(session)
    async with served(journal=journal) as api:
        after, replayed = await api.show(session), await api.rows(session)
    assert len(before["tree"]["leaves"]) == 20
    assert after == before
    for row, one in zip(replayed, rows, strict=True):
        assert row.tokens.tolist() == one.tokens.tolist()
        assert row.rollout_log_probs.tolist() == one.rollout_log_probs.tolist()
        assert row.loss_mask.tolist() == one.loss_mask.tolist()
