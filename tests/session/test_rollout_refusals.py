"""What the rollout driver refuses: prompts that no agent could use, addresses that lead nowhere, other servers."""

import asyncio
from typing import Any

import pytest

from miles_norm.errors import ConfigError, SessionError
from miles_norm.session.rollout import RolloutOptions, run_rollouts

pytestmark = pytest.mark.anyio


async def test_no_server_at_all() -> None:
    async def agent(**_: Any) -> None: ...

    with pytest.raises(SessionError, match=r"POST http://127.0.0.1:1/sessions\n  got: .*Cannot connect"):
        await run_rollouts(agent, ["a"], "http://127.0.0.1:1", RolloutOptions(retries=0))
    for address in (
        "127.0.0.1:1",
        "ftp://host",
        "http://",
        "http://host:70000",
        "http://a:b@host",
        "http://host/?a",
        "",
    ):
        with pytest.raises(ConfigError, match="address of the session server"):
            await run_rollouts(agent, ["a"], address)


async def test_a_server_that_is_another_one() -> None:
    """What it answers is no session; that is no reason to ask again."""
    asked = 0

    async def agent(**_: Any) -> None: ...

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SessionError, match="got:      a body that names no session: b'<html>'"):
            await run_rollouts(agent, ["a"], f"http://127.0.0.1:{port}")
    assert asked == 1


async def test_prompts_that_are_none() -> None:
    async def agent(**_: Any) -> None: ...

    prompts = ["fine", "", 3, {"prompt": "a", "lable": "b"}, {"prompt": "a", "metadata": 1}, None, {}]
    with pytest.raises(ConfigError) as caught:
        await run_rollouts(agent, prompts, "http://127.0.0.1:1")
    for number, text in {
        1: "the text is empty",
        2: "the prompt is 3, and neither",
        3: "unknown lable",
        4: "the metadata are 1",
        5: "no prompt in None",
        6: "no prompt in {}",
    }.items():
        assert f"prompt {number}: {text}" in str(caught.value)
    assert "prompt 0" not in str(caught.value)
    with pytest.raises(ConfigError, match="got:      no prompts"):
        await run_rollouts(agent, [], "http://127.0.0.1:1")
    for given in ("text", {"prompt": "a"}):
        with pytest.raises(ConfigError, match="which is one prompt and no list of them"):
            await run_rollouts(agent, given, "http://127.0.0.1:1")


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ([MESSAGE, {"role": "robot", "content": "a"}], "message 1: the role is 'robot', and none of"),
        ([{"content": "a"}], "message 0: the role is None"),
        ([MESSAGE, "a", None], "message 1: it is 'a', and no object, message 2: it is None, and no object"),
        ([{"role": "user", "content": 3}], "message 0: the content is 3"),
        ([], r"the prompt is \[\], and neither a text nor a list of messages"),
        ({"prompt": "a", "label": 4}, "the label is 4, and no text"),
        ({"prompt": "a", "label": ["x"], "metadata": {3: 1}, "tools": []}, "the label is .*names that.*unknown tools"),
        ({"prompt": None}, "the prompt is None"),
    ],
)
async def test_prompts_that_no_agent_could_use(prompt: Any, fault: str) -> None:
    async def agent(**_: Any) -> None: ...

    with pytest.raises(ConfigError, match=f"prompt 1: .*{fault}"):
        await run_rollouts(agent, ["a", prompt], "http://127.0.0.1:1")
