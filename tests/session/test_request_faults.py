"""Requests that a session server refuses: it says why, records nothing, and goes on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conversations import assistant, user
from scripted import Api, ScriptedEngine, said, served

pytestmark = pytest.mark.anyio

QUESTION = [user("Why?")]


def message_of(body: Any) -> str:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


async def refused(api: Api, path: str, body: bytes) -> tuple[int, str]:
    status, answer = await api.call("POST", path, body)
    return status, message_of(answer)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "messages: Field required"),
        (b"{", "Invalid JSON"),
        (b"\xff\xfe{}", "Invalid JSON"),
        (b"[1]", "Input should be an object"),
        (b'{"messages": "hi"}', "messages: Input should be a valid"),
        (b'{"messages": ["hi"]}', "messages.0: Input should be an object"),
        (b'{"messages": [{"content": "hi"}]}', "messages.0: the role is None, and none of system, developer, user,"),
        (b'{"messages": [{"role": "robot"}]}', "messages.0: the role is 'robot', and none of"),
        (b'{"messages": [{"role": ["user"]}]}', "messages.0: the role is ['user'], and none of"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages.0: the content is 3, and neither a text nor"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "messages.0: the content is ['a'], and neither"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stream": "no"}', "stream: Input should be a valid bool"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "Invalid JSON"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "Invalid JSON: recursion limit exceeded"),
    ],
)
async def test_bodies_that_are_no_request(body: bytes, match: str) -> None:
    engine = ScriptedEngine()
    async with served(engine) as api:
        session = await api.create()
        status, message = await refused(api, f"/sessions/{session}/v1/chat/completions", body)
        assert status == 400
        assert match in message
        await api.turn(session, QUESTION)
        assert await api.parents(session) == [None]
    assert len(engine.requests) == 1


async def test_all_problems_are_named_at_once() -> None:
    messages = [{"role": "user", "content": "fine"}, {"role": "x"}, *[{"role": "tool", "content": 1}] * 12]
    async with served() as api:
        session = await api.create()
        status, body = await api.try_turn(session, messages, n=3, seed="one")
    message = message_of(body)
    assert status == 400
    assert all(f"messages.{number}: " in message for number in range(1, 11))
    assert "; and 5 more" in message  # 13 messages, n and seed are wrong, and 10 of them are shown


async def test_deep_json_is_recorded_or_refused_and_never_an_error_of_the_server(tmp_path: Any) -> None:
    async with served(journal=str(tmp_path / "journal")) as api:
        session, statuses = await api.create(), set()
        for depth in (10, 100, 180, 190, 250):
            content = json.loads('[{"type": "text", "text": "a", "x": ' + "[" * depth + "]" * depth + "}]")
            status, _ = await api.try_turn(session, [user("a") | {"extra": content}])
            statuses.add(status)
        assert statuses == {200, 400}
        assert len(await api.turns(session)) >= 3


@pytest.mark.parametrize(
    ("path", "body", "match"),
    [
        ("/sessions", {"id": "mine"}, "id: Extra inputs are not permitted"),
        ("/sessions", {"metadata": []}, "metadata: Input should be an object"),
        ("/samples", {"index": 1.5}, "index"),
        ("/samples", {"picker": "best"}, "picker: Input should be 'keep_all' or 'drop_retries'"),
        ("/samples", {"max_seq_len": 0}, "max_seq_len: Input should be greater than or equal to 1"),
        ("/samples", {"agent": {"reward": "good"}}, "agent.reward"),
        ("/samples", {"agent": {"rewards": [1]}}, "agent.rewards: Input should be an object"),
        ("/samples", {"agent": 1}, "agent: Input should be an object"),
    ],
)
async def test_other_bodies(path: str, body: Any, match: str) -> None:
    async with served() as api:
        session = await api.create()
        path = path if path == "/sessions" else f"/sessions/{session}{path}"
        status, message = await refused(api, path, json.dumps(body).encode())
    assert status == 400
    assert match in message


async def test_a_reward_for_a_response_that_is_not_there() -> None:
    async with served() as api:
        session = await api.create()
        await api.turn(session, QUESTION)
        asked = {"agent": {"rewards": {"nobody": 1.0}}}
        status, body = await api.call("POST", f"/sessions/{session}/samples", asked)
    assert status == 422
    assert "response id nobody, which no turn of the session has" in message_of(body)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/sessions/{}"),
        ("DELETE", "/sessions/{}"),
        ("POST", "/sessions/{}/samples"),
        ("POST", "/sessions/{}/v1/chat/completions"),
    ],
)
async def test_sessions_that_are_not_there(method: str, path: str) -> None:
    async with served() as api:
        deleted = await api.create()
        assert (await api.call("DELETE", f"/sessions/{deleted}"))[0] == 204
        for name in (deleted, "never", "..%2f..", "x" * 5000):
            status, body = await api.call(method, path.format(name), {"messages": QUESTION} if "v1" in path else None)
            assert status == 404
            assert "no session of this id" in message_of(body) or "no such route" in message_of(body)


async def test_routes_that_are_not_there() -> None:
    async with served() as api:
        for method, path, status in (("GET", "/", 404), ("GET", "/sessions", 405), ("POST", "/v1/models", 404)):
            found, body = await api.call(method, path)
            assert found == status
            wanted = {404: "a base_url ends in /sessions/SESSION_ID/v1", 405: "Method Not Allowed"}[status]
            assert wanted in message_of(body)


async def test_without_the_key_there_is_only_health() -> None:
    engine = ScriptedEngine()
    async with served(engine, api_key="s3cret-\N{SNOWMAN}") as api:
        session = await api.create()
        paths = [
            ("POST", "/sessions"), ("GET", f"/sessions/{session}"), ("DELETE", f"/sessions/{session}"),
            ("POST", f"/sessions/{session}/v1/chat/completions"), ("POST", f"/sessions/{session}/samples"),
            ("GET", "/metrics"), ("GET", "/nowhere"),
        ]  # fmt: skip
        for method, path in paths:
            for given in ("", "Bearer ", "Bearer wrong", "s3cret-\N{SNOWMAN}", "Bearer s3cret-\N{SNOWMAN} "):
                # aiohttp sends headers as UTF-8, and strips what follows the key: make the last one differ.
                headers = {"Authorization": given + ("x" if given.endswith(" ") else "")}
                status, body = await api.call(method, path, {"messages": QUESTION}, headers=headers)
                assert status == 401
                assert body["error"]["type"] == "authentication_error"
                assert "s3cret" not in message_of(body)
        assert (await api.call("GET", "/health", headers={"Authorization": ""}))[0] == 200
        await api.turn(session, QUESTION)
        assert (await api.metrics())['errors_total{error="UnauthorizedError"}'] == len(paths) * 5
    assert len(engine.requests) == 1


async def test_a_body_that_says_it_is_too_large() -> None:
    async with served(max_body_bytes=10_000) as api:
        session = await api.create()
        path = f"/sessions/{session}/v1/chat/completions"
        for body, status in ((b" " * 10_000, 400), (b" " * 10_001, 413), (b" " * 5_000_000, 413)):
            assert (await api.call("POST", path, body))[0] == status
        _, answer = await api.call("POST", path, b" " * 10_001)
        assert "10001 bytes" in message_of(answer)
        assert "at most max_body_bytes = 10000" in message_of(answer)
        await api.turn(session, QUESTION)


async def test_a_body_without_a_length_that_becomes_too_large() -> None:
    """What lies beyond the limit is not kept: an endless body ends in an answer."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1
            yield b" " * 100_000
            await asyncio.sleep(0)

    async with served(max_body_bytes=1_000_000) as api:
        session = await api.create()
        path = f"{api.address}/sessions/{session}/v1/chat/completions"
        async with api.http.post(path, data=endless()) as answer:
            assert answer.status == 413
            assert "more than 1000000 bytes" in message_of(await answer.json())
        await api.turn(session, QUESTION)
    assert sent > 10


async def test_no_more_turns_than_a_session_may_have() -> None:
    """Those under way count: four requests at once, and two turns."""
    async with served(max_nodes=2) as api:
        session = await api.create()
        answers = await asyncio.gather(*(api.try_turn(session, [user(str(number))]) for number in range(4)))
        assert sorted(status for status, _ in answers) == [200, 200, 409, 409]
        status, body = await api.try_turn(session, QUESTION)
        assert status == 409
        assert "at most max_nodes = 2" in message_of(body)
        assert await api.parents(session) == [None, None]
        assert len(await api.rows(session)) == 2


async def test_no_more_sessions_than_the_server_may_have() -> None:
    async with served(max_sessions=2) as api:
        first, _ = await api.create(), await api.create()
        status, body = await api.call("POST", "/sessions")
        assert status == 429
        assert "at most max_sessions = 2" in message_of(body)
        await api.call("DELETE", f"/sessions/{first}")
        await api.create()
        assert (await api.metrics())["sessions"] == 2


async def test_a_conversation_that_was_cut_is_not_extended() -> None:
    async with served(ScriptedEngine(lambda request: said("and so", finish_reason="length"))) as api:
        session = await api.create()
        await api.turn(session, QUESTION)
        extended = [*QUESTION, assistant("and so"), user("Go on.")]
        path = f"{api.address}/sessions/{session}/v1/chat/completions"
        async with api.http.post(path, json={"messages": extended}) as answer:
            assert answer.status == 409
            assert answer.headers["x-should-retry"] == "false"
        assert await api.parents(session) == [None]


async def test_messages_that_the_template_cannot_render() -> None:
    """The embedded engine's renderer names them."""
    from miles_norm.session.engines.chatml import ChatMLRenderer

    async with served(ScriptedEngine(renderer=ChatMLRenderer())) as api:
        session = await api.create()
        image = [{"type": "image_url", "image_url": {"url": "x"}}]
        status, body = await api.try_turn(session, [{"role": "user", "content": image}])
        assert status == 400
        assert body["error"]["code"] == "RenderingError"
        assert await api.turns(session) == []


async def test_an_error_nobody_thought_of(caplog: pytest.LogCaptureFixture) -> None:
    """It is an answer, its traceback is in the log, and the session goes on."""

    def script(request: Any) -> Any:
        if len(engine.requests) == 1:
            raise ZeroDivisionError("secret detail")
        return said("ok")

    engine = ScriptedEngine(script)
    async with served(engine) as api:
        session = await api.create()
        status, body = await api.try_turn(session, QUESTION)
        assert status == 500
        assert message_of(body) == "an error of the server; its log has more"
        assert body["error"]["code"] == "ZeroDivisionError"
        assert (await api.show(session))["in_flight"] == 0
        await api.turn(session, QUESTION)
        assert (await api.metrics())['errors_total{error="ZeroDivisionError"}'] == 1
    assert "secret detail" in caplog.text
