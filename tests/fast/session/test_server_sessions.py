"""Sessions of a server without the server: what is recorded when clients leave, sessions end and journals fail."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from conversations import assistant, user
from scripted import Gate, ScriptedEngine, said, until

from miles_norm.errors import (
    ConfigError,
    JournalError,
    NodeLimitError,
    SessionLimitError,
    UnknownSessionError,
)
from miles_norm.session.rollout import RolloutOptions
from miles_norm.session.server import ServerConfig, Sessions
from miles_norm.session.server.requests import ChatRequest
from miles_norm.session.store import Journal


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def ask(*messages: Any, **fields: Any) -> ChatRequest:
    return ChatRequest(messages=list(messages) or [user("hi")], **fields)


class SlowJournal(Journal):
    """A journal whose records wait until it is opened, as on a slow disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.waiting = 0
        self.gate = asyncio.Event()

    async def append(self, session_id: str, kind: str, payload: bytes) -> None:
        if kind == "turn":
            self.waiting += 1
            await self.gate.wait()
        await super().append(session_id, kind, payload)


def test_a_client_that_leaves_while_its_turn_is_written_does_not_undo_it(tmp_path: Path) -> None:
    """What is in the journal is in the forest, and counts against the limit until it is."""

    async def test() -> None:
        journal = SlowJournal(tmp_path / "journal")
        sessions = Sessions(ScriptedEngine(), ServerConfig(max_nodes=1), journal)
        session = await sessions.create()
        turn = asyncio.create_task(sessions.complete(session.session_id, ask()))
        await until(lambda: journal.waiting)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert (session.in_flight, len(session.forest.nodes)) == (1, 0)
        with pytest.raises(NodeLimitError, match="0 turns and one more beside 1 under way"):
            await sessions.complete(session.session_id, ask())
        journal.gate.set()
        await sessions.close()
        assert (session.in_flight, len(session.forest.nodes)) == (0, 1)
        await journal.close()
        again = Sessions(ScriptedEngine(), ServerConfig(), Journal(tmp_path / "journal"))
        assert len(again.get(session.session_id).forest.nodes) == 1

    run(test())


def test_a_client_that_leaves_while_the_engine_samples_leaves_nothing() -> None:
    async def test() -> None:
        engine = ScriptedEngine(Gate())
        sessions = Sessions(engine, ServerConfig())
        session = await sessions.create()
        turn = asyncio.create_task(sessions.complete(session.session_id, ask()))
        await until(lambda: engine.requests)
        assert session.in_flight == 1
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert (session.in_flight, session.forest.nodes, engine.cancelled) == (0, [], 1)

    run(test())


def test_a_turn_that_cannot_be_written_was_never_there(tmp_path: Path) -> None:
    async def test() -> None:
        journal = Journal(tmp_path / "journal")
        sessions = Sessions(ScriptedEngine(), ServerConfig(), journal)
        session = await sessions.create()
        await journal.close()
        with pytest.raises(JournalError, match="it is closed"):
            await sessions.complete(session.session_id, ask())
        assert (session.in_flight, session.forest.nodes) == (0, [])
        with pytest.raises(JournalError):
            await sessions.create()
        assert len(sessions) == 1
        with pytest.raises(JournalError):
            await sessions.delete(session.session_id)
        assert sessions.get(session.session_id) is session
        assert not session.deleted

    run(test())


def test_what_was_deleted_stays_deleted(tmp_path: Path) -> None:
    """Also where a turn was sampled meanwhile: no record follows the removal of its session."""

    async def test() -> None:
        gate = Gate()
        journal = Journal(tmp_path / "journal")
        engine = ScriptedEngine(gate)
        sessions = Sessions(engine, ServerConfig(), journal)
        session, other = await sessions.create({"task": 1}), await sessions.create()
        turn = asyncio.create_task(sessions.complete(session.session_id, ask()))
        await until(lambda: engine.requests)
        await sessions.delete(session.session_id)
        gate.open()
        with pytest.raises(UnknownSessionError):
            await turn
        with pytest.raises(UnknownSessionError, match="neither deleted nor expired"):
            sessions.get(session.session_id)
        await journal.close()
        again = Sessions(engine, ServerConfig(), Journal(tmp_path / "journal"))
        assert len(again) == 1
        assert again.get(other.session_id).created_at == other.created_at

    run(test())


def test_sessions_expire_when_nobody_uses_them() -> None:
    async def test() -> None:
        gate = Gate()
        engine = ScriptedEngine(gate)
        sessions = Sessions(engine, ServerConfig(idle_seconds=1e-6))
        waiting, idle = await sessions.create(), await sessions.create()
        turn = asyncio.create_task(sessions.complete(waiting.session_id, ask()))
        await until(lambda: engine.requests)
        await asyncio.sleep(0.01)
        # One that waits for the engine is used, however long that takes.
        assert await sessions.expire() == 1
        with pytest.raises(UnknownSessionError):
            sessions.get(idle.session_id)
        gate.open()
        await turn
        await asyncio.sleep(0.01)
        assert await sessions.expire() == 1
        assert len(sessions) == 0
        assert await Sessions(engine, ServerConfig()).expire() == 0

    run(test())


def test_ids_cannot_be_guessed() -> None:
    async def test() -> None:
        sessions = Sessions(ScriptedEngine(), ServerConfig(max_sessions=50))
        ids = {(await sessions.create()).session_id for _ in range(50)}
        assert len(ids) == 50
        assert {len(name) for name in ids} == {32}  # 24 bytes of the system's randomness
        with pytest.raises(SessionLimitError, match="50 and one more"):
            await sessions.create()

    run(test())


def test_a_response_id_is_given_where_the_engine_gives_none() -> None:
    async def test() -> None:
        ids = iter(["of the engine", None, None])
        sessions = Sessions(ScriptedEngine(lambda request: said("ok", response_id=next(ids))), ServerConfig())
        session = await sessions.create()
        nodes = [await sessions.complete(session.session_id, ask()) for _ in range(3)]
        found = [str(node.completion.response_id) for node in nodes]
        assert found[0] == "of the engine"
        assert all(name.startswith("chatcmpl-") for name in found[1:])
        assert len(set(found)) == 3

    run(test())


def test_tools_that_are_withheld_are_not_rendered() -> None:
    """tool_choice none: the prompt has no tools, so the turn starts a row, which metrics count."""

    async def test() -> None:
        sessions = Sessions(ScriptedEngine(lambda request: said("ok")), ServerConfig())
        session = await sessions.create()
        tools = [{"type": "function", "function": {"name": "f"}}]
        await sessions.complete(session.session_id, ask(tools=tools))
        again = [user("hi"), assistant("ok"), user("go on")]
        node = await sessions.complete(session.session_id, ask(*again, tools=tools, tool_choice="none"))
        assert (node.parent, node.starts_row) == (0, True)
        assert b"miles_norm_session_mismatches_total 1.0" in sessions.metrics.page()

    run(test())


@pytest.mark.parametrize(
    "settings",
    [{"concurrency": 0}, {"n_samples_per_prompt": 0}, {"retries": -1}, {"timeout_seconds": 0.0}, {"picker": "best"}],
)
def test_options_that_do_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RolloutOptions(**settings)


@pytest.mark.parametrize("settings", [{"port": 70_000}, {"max_nodes": 0}, {"idle_seconds": 0.0}, {"api_key": ""}])
def test_server_settings_that_do_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)


def test_unknown_settings_of_a_server_do_not_speak_of_training() -> None:
    with pytest.raises(ConfigError, match=r"no such field .*'port'(.|\n)*would be left out in silence"):
        ServerConfig(prot=1)  # type: ignore[call-arg]
