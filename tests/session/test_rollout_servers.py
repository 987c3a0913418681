"""The rollout driver and a server that is not always there."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversations import user
from scripted import ScriptedEngine, ask, served, until

from miles_norm import Sample
from miles_norm.errors import RequestError, SessionError
from miles_norm.session.rollout import RolloutOptions, run_rollouts
from miles_norm.session.server import ServerConfig, running_server

pytestmark = pytest.mark.anyio


async def test_a_server_that_is_not_there_yet() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def agent(base_url: str, **_: Any) -> None:
        await ask(base_url, user("hi"))

    rolling = asyncio.create_task(run_rollouts(agent, ["a"], f"http://127.0.0.1:{port}/"))
    await asyncio.sleep(0.1)
    async with running_server(ScriptedEngine(), ServerConfig(port=port)):
        (row,) = await rolling
    assert row.status == "completed"


async def test_a_server_that_is_started_again_between_the_agent_and_its_rows(tmp_path: Path) -> None:
    """The turns are in the journal, and the driver asks again; the agent is not run again."""
    calls, told = 0, asyncio.Event()

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        await ask(base_url, user("hi"))
        told.set()
        await until(lambda: not told.is_set())
        return {"reward": 1.0}

    journal = str(tmp_path / "journal")
    async with running_server(ScriptedEngine(), ServerConfig(port=0, journal=journal)) as address:
        rolling = asyncio.create_task(run_rollouts(agent, ["a"], address))
        await told.wait()
    told.clear()
    await asyncio.sleep(0.3)
    async with running_server(ScriptedEngine(), ServerConfig(port=int(address.split(":")[2]), journal=journal)):
        (row,) = await rolling
    assert (calls, row.status, row.reward) == (1, "completed", 1.0)
    assert row.loss_mask.any()


async def test_a_server_that_is_full_for_a_while() -> None:
    async def agent(base_url: str, **_: Any) -> None:
        await ask(base_url, user("hi"))

    async with served(max_sessions=2) as api:
        rows = await run_rollouts(agent, ["a"] * 8, api.address, RolloutOptions(retries=8))
        assert [row.status for row in rows] == ["completed"] * 8


async def test_a_key_that_is_no_header_is_not_tried_again() -> None:
    async def agent(**_: Any) -> None: ...

    with pytest.raises(SessionError, match="ValueError"):
        async with served() as api, asyncio.timeout(10):
            await run_rollouts(agent, ["a"], api.address, RolloutOptions(api_key="a\nb", retries=1000))


async def test_a_wrong_key_ends_the_batch() -> None:
    async def agent(**_: Any) -> None: ...

    async with served(api_key="right") as api:
        with pytest.raises(RequestError, match="status 401: key of the request"):
            await run_rollouts(agent, ["a"] * 3, api.address, RolloutOptions(api_key="wrong"))
        assert len(await run_rollouts(agent, ["a"] * 3, api.address, RolloutOptions(api_key="right"))) == 3


async def test_a_server_that_fails_late_leaves_what_has_finished() -> None:
    """The observer has it, whatever ends the batch."""
    finished: list[Sequence[Sample]] = []

    async def agent(base_url: str, prompt: str, **_: Any) -> dict[str, Any]:
        if prompt == "early":
            await ask(base_url, user("hi"))
            return {"reward": 1.0}
        await until(lambda: len(finished) == 2)
        stop.set()
        await asyncio.Event().wait()
        return {}

    stop = asyncio.Event()
    server = running_server(ScriptedEngine(), ServerConfig(port=0))
    address = await server.__aenter__()
    options = RolloutOptions(retries=1, timeout_seconds=1)
    rolling = asyncio.create_task(
        run_rollouts(agent, ["early", "late", "early"], address, options, on_rollout=finished.append)
    )
    await stop.wait()
    await server.__aexit__(None, None, None)
    with pytest.raises(SessionError, match="Cannot connect"):
        await rolling
    assert sorted((row.index, row.reward) for rows in finished for row in rows) == [(0, 1.0), (2, 1.0)]
