"""Where a server listens, how it ends, and which sessions it lets go."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from conversations import user
from processes import running
from scripted import Api, Gate, ScriptedEngine, connected, served, until

from miles_norm.session.server import ServerConfig, run, running_server

pytestmark = pytest.mark.anyio

SERVER = Path(__file__).parent / "session_server.py"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_that_is_told_to_end_finishes_its_turns(tmp_path: Path, number: int) -> None:
    journal = tmp_path / "journal"
    with running(SERVER, json.dumps({"port": 0, "journal": str(journal)})) as process:
        async with connected(process.line()) as api:
            session = await api.create()
            turns = [asyncio.create_task(api.turn(session, [user(str(n))])) for n in range(20)]
            await until(lambda: in_flight(api, session))
            process.signal(number)
            # Those that had arrived are answered; a connection that was too late finds nobody.
            answers = await asyncio.gather(*turns, return_exceptions=True)
            answered = [answer["id"] for answer in answers if isinstance(answer, dict)]
            assert answered
            assert await asyncio.to_thread(process.line) == "ended"
            assert await asyncio.to_thread(process.wait) == 0
    async with served(journal=str(journal)) as api:
        assert set(answered) <= set(await api.turns(session))


LINE = b"POST /sessions HTTP/1.1\r\n"


@pytest.mark.parametrize("half", [LINE, LINE + b"Content-Length: 9\r\n\r\n{"], ids=["head", "body"])
async def test_a_half_sent_request_does_not_keep_a_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, half: bytes
) -> None:
    monkeypatch.setattr(run, "_GRACE_SECONDS", 0.2)
    async with served() as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(api.address.rpartition(":")[2]))
        writer.write(half)
        await writer.drain()
        await asyncio.sleep(0.1)
    answer = await reader.read()
    writer.close()
    expected = [] if half == LINE else ["not waited for after 0.2 s: requests under way, 1"]
    assert caplog.messages == expected  # and no traceback
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable" if expected else b"")
    if expected:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "ServerEnding"


async def test_a_turn_that_outlasts_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is recorded, and the same request may be sent again."""
    monkeypatch.setattr(run, "_GRACE_SECONDS", 0.2)
    engine = ScriptedEngine(Gate())
    server = running_server(engine, ServerConfig(port=0))
    async with connected(await server.__aenter__()) as api:
        turn = asyncio.create_task(api.try_turn(await api.create(), [user("hi")]))
        await until(lambda: engine.requests)
        await server.__aexit__(None, None, None)
        status, body = await turn
    assert (status, body["error"]["code"]) == (503, "ServerEnding")
    assert engine.cancelled == 1


async def in_flight(api: Api, session: str) -> int:
    return int((await api.show(session))["in_flight"])


async def test_sessions_that_nobody_uses_expire(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    async with served(journal=journal, idle_seconds=0.4) as api:
        idle, used = await api.create(), await api.create()
        async with asyncio.timeout(20):
            while (await api.metrics())["sessions"] == 2:
                await api.turn(used, [user("still here")])
                await asyncio.sleep(0.01)
        assert (await api.call("GET", f"/sessions/{idle}"))[0] == 404
        turns = await api.turns(used)
        assert turns
    async with served(journal=journal) as api:
        assert (await api.metrics())["sessions"] == 1
        assert await api.turns(used) == turns


async def test_an_address_that_is_taken() -> None:
    async with served() as api:
        port = int(api.address.rpartition(":")[2])
        config = ServerConfig(port=port)
        with pytest.raises(ValueError, match=rf"address 127.0.0.1:{port}\n  got:      Address already in use"):
            async with running_server(ScriptedEngine(), config):
                pass
        await api.create()


async def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match=r"address 192.0.2.1:0"):
        async with served(host="192.0.2.1"):
            pass


async def test_beyond_this_machine_without_a_key_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with served(host="0.0.0.0", api_key="key"):
        pass
    assert caplog.text == ""
    async with served(host="0.0.0.0"):
        pass
    assert "listening on 0.0.0.0 without an api_key" in caplog.text


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
async def test_ipv6() -> None:
    async with served(host="::1") as api:
        assert api.address.startswith("http://[::1]:")
        await api.create()
