"""Engines that fail, clients that leave, requests that race: nothing half-done is recorded, and the session goes on."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conversations import assistant, user
from processes import running
from scripted import Api, Gate, ScriptedEngine, connected, said, served, until

from miles_norm.errors import EngineContractError, EngineRejectedError, EngineUnavailableError
from miles_norm.session.engines.chatml import ChatMLRenderer
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.engines.sglang import SGLangEngine
from miles_norm.session.server import ServerConfig, running_server

pytestmark = pytest.mark.anyio

ENGINE = Path(__file__).parent / "engine_process.py"
QUESTION = [user("Why?")]


async def test_an_engine_process_that_is_killed_mid_turn_and_started_again() -> None:
    with running(ENGINE, 0, 300) as doomed:
        url = doomed.line()
        engine = SGLangEngine(url, ChatMLRenderer())
        async with running_server(engine, ServerConfig(port=0)) as address, connected(address) as api:
            session = await api.create()
            turns = [asyncio.create_task(api.try_turn(session, QUESTION)) for _ in range(2)]
            for _ in turns:
                assert await asyncio.to_thread(doomed.line) == "request"
            assert (await api.show(session))["in_flight"] == 2
            doomed.signal(signal.SIGKILL)
            for status, body in await asyncio.gather(*turns):
                assert status == 502
                assert f"engine at {url}" in body["error"]["message"]
            assert (await api.try_turn(session, QUESTION))[0] == 502
            assert (await api.call("GET", "/health"))[0] == 503
            shown = await api.show(session)
            assert (shown["in_flight"], shown["tree"]["nodes"]) == (0, [])
            assert (await api.metrics())['errors_total{error="EngineUnavailableError"}'] == 3
            with running(ENGINE, url.rpartition(":")[2], 0) as revived:
                assert revived.line() == url
                first = await api.turn(session, QUESTION)
                again = [*QUESTION, first["choices"][0]["message"], user("And then?")]
                await api.turn(session, again)
                assert (await api.call("GET", "/health"))[0] == 200
            assert await api.parents(session) == [None, 0]
            assert len(await api.rows(session)) == 1


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (EngineUnavailableError("the engine", got="gone", expected="", reason="", remedy=""), 502, "gone"),
        (EngineContractError("the answer", got="no tokens", expected="", reason="", remedy=""), 502, "no tokens"),
        (EngineRejectedError.of_answer(422, '{"detail": "as it came"}'), 422, "as it came"),
        (EngineRejectedError.of_answer(413, "plain text"), 413, "plain text"),
    ],
)
async def test_what_an_engine_raises(error: Exception, status: int, text: str) -> None:
    def script(request: GenerationRequest) -> Any:
        if len(engine.requests) == 2:
            raise error
        return said("ok")

    engine = ScriptedEngine(script)
    async with served(engine) as api:
        session = await api.create()
        await api.turn(session, QUESTION)
        again = [*QUESTION, assistant("ok"), user("And then?")]
        found, body = await api.try_turn(session, again)
        assert found == status
        assert text in str(body)
        assert await api.parents(session) == [None]
        await api.turn(session, again)
        assert await api.parents(session) == [None, 0]


async def test_an_answer_that_does_not_fit_itself_is_not_recorded() -> None:
    """More log-probs than tokens: nothing that could be trained."""
    async with served(ScriptedEngine(lambda request: said("ok", token_ids=[1]))) as api:
        session = await api.create()
        status, body = await api.try_turn(session, QUESTION)
        assert status == 502
        assert "1 token ids and log_probs of shape [3]" in body["error"]["message"]
        assert await api.turns(session) == []


async def open_turn(api: Api, session: str, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A turn on a connection of its own, which a test may cut."""
    host, port = api.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"messages": QUESTION, **fields}).encode()
    head = f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_mid_generation_cancels_it(stream: bool) -> None:
    gate = Gate()
    engine = ScriptedEngine(gate)
    async with served(engine) as api:
        session = await api.create()
        _, staying = await open_turn(api, session, stream=stream)
        _, leaving = await open_turn(api, session, stream=stream)
        await until(lambda: len(engine.requests) == 2)
        leaving.close()
        await until(lambda: engine.cancelled == 1)
        assert await api.turns(session) == []
        gate.open()
        # Only the other one's turn is recorded, and the session is as usable as before.
        await until(lambda: api.turns(session))
        staying.close()
        await api.turn(session, QUESTION)
        shown = await api.show(session)
        assert (shown["in_flight"], len(shown["tree"]["nodes"])) == (0, 2)
        assert engine.cancelled == 1


async def test_a_client_that_leaves_mid_stream_loses_nothing() -> None:
    """The reply is recorded before its first byte is sent; what of it was read does not matter."""
    reply = said("x" * 500_000)
    async with served(ScriptedEngine(lambda request: reply)) as api:
        session = await api.create()
        reader, writer = await open_turn(api, session, stream=True)
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        await reader.readuntil(b"data: ")
        writer.close()
        assert len(await api.turns(session)) == 1
        await api.turn(session, [*QUESTION, reply.message, user("Go on.")])
        assert await api.parents(session) == [None, 0]
        assert (await api.show(session))["in_flight"] == 0


async def test_requests_that_race_become_siblings() -> None:
    """All attach before any is committed; none waits for another."""
    gate = Gate("again")
    first = said("ok")

    def script(request: GenerationRequest) -> Any:
        return first if len(request.messages) == 1 else gate(request)

    engine = ScriptedEngine(script)
    async with served(engine) as api:
        session = await api.create()
        await api.turn(session, QUESTION)
        again = [*QUESTION, assistant("ok"), user("And then?")]
        racing = [asyncio.create_task(api.turn(session, again)) for _ in range(8)]
        await until(lambda: len(engine.requests) == 9)
        assert (await api.show(session))["in_flight"] == 8
        gate.open()
        answers = await asyncio.gather(*racing)
        assert await api.parents(session) == [None, *[0] * 8]
        assert len({answer["id"] for answer in answers}) == 8
        assert sorted((await api.turns(session))[1:]) == sorted(answer["id"] for answer in answers)
        rows = await api.rows(session, picker="keep_all")
        # The turn before is trained once, by the leaf that was committed first.
        assert len(rows) == 8
        owners = [int(row.loss_mask.sum()) for row in rows]
        assert sorted(owners) == [len("again") + 1] * 7 + [len("again") + 1 + len("ok") + 1]


async def test_the_same_first_request_twice_is_two_trees() -> None:
    async with served() as api:
        session = await api.create()
        await asyncio.gather(*(api.turn(session, QUESTION) for _ in range(2)))
        assert await api.parents(session) == [None, None]


async def test_a_session_that_is_deleted_while_a_turn_is_sampled() -> None:
    gate = Gate()
    engine = ScriptedEngine(gate)
    async with served(engine) as api:
        session = await api.create()
        turn = asyncio.create_task(api.try_turn(session, QUESTION))
        await until(lambda: engine.requests)
        assert (await api.call("DELETE", f"/sessions/{session}"))[0] == 204
        gate.open()
        status, body = await turn
        assert status == 404
        assert "no session of this id" in body["error"]["message"]
        assert (await api.metrics())["sessions"] == 0


async def test_health_is_that_of_the_engine() -> None:
    engine = ScriptedEngine()
    async with served(engine) as api:
        await api.create()
        assert await api.call("GET", "/health") == (200, {"status": "ok", "sessions": 1})
        engine.up = False
        assert await api.call("GET", "/health") == (503, {"status": "engine unavailable", "sessions": 1})


async def test_metrics_count_what_was_recorded() -> None:
    async with served() as api:
        session = await api.create()
        first = await api.turn(session, QUESTION)
        await api.turn(session, [*QUESTION, first["choices"][0]["message"], user("And then?")])
        rows = await api.rows(session)
        found = await api.metrics()
    assert found['turns_total{finish_reason="stop"}'] == 2
    assert found['tokens_total{kind="completion"}'] == 2 * (len("ok 0") + 1)
    prompts = first["usage"]["prompt_tokens"] + len(rows[0].tokens) - (len("ok 1") + 1)
    assert found['tokens_total{kind="prompt"}'] == prompts
    assert (found["rows_total"], found["sessions"], found["mismatches_total"]) == (1, 1, 0)
    assert found["turn_seconds_count"] == found["engine_seconds_count"] == 2
