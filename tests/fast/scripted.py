"""An engine whose replies are scripted, and what tests ask of a session server over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from conversations import Chat, reply

from miles_norm.samples import Sample
from miles_norm.session.completion import Completion
from miles_norm.session.engines.protocol import Engine, GenerationRequest
from miles_norm.session.rendering import Renderer
from miles_norm.session.server import ServerConfig, running_server
from miles_norm.session.wire import decode_rows

CHAT = Chat()
Script = Callable[[GenerationRequest], Completion | Awaitable[Completion]]


def said(text: str, **fields: Any) -> Completion:
    """A completion of this text, its response id left to the server."""
    return reply(CHAT, text, **{"response_id": None} | fields)


class ScriptedEngine:
    """Replies as its script says; the default one says ``ok 0``, ``ok 1`` and so on."""

    def __init__(self, script: Script | None = None, renderer: Renderer = CHAT) -> None:
        self.renderer = renderer
        self.requests: list[GenerationRequest] = []
        self.cancelled = 0
        self.up = True
        self._script = script or (lambda request: said(f"ok {len(self.requests) - 1}"))

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> bool:
        return self.up

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        try:
            result = self._script(request)
            return result if isinstance(result, Completion) else await result
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def update_weights(self, path: Any, weight_version: str) -> None: ...


class Gate:
    """A script that waits until it is opened."""

    def __init__(self, text: str = "ok") -> None:
        self._open, self._text = asyncio.Event(), text

    async def __call__(self, request: GenerationRequest) -> Completion:
        await self._open.wait()
        return said(self._text)

    def open(self) -> None:
        self._open.set()


class Api:
    """A session server over HTTP."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self.http, self.address = http, address

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and body, parsed where it is JSON; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        async with self.http.request(method, self.address + path, data=io.BytesIO(data), **options) as answer:
            content = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(content) if is_json else content

    async def create(self, **metadata: Any) -> str:
        status, body = await self.call("POST", "/sessions", {"metadata": metadata})
        assert status == 201, body
        return str(body["session_id"])

    async def try_turn(self, session: str, messages: Sequence[Any], **fields: Any) -> tuple[int, Any]:
        return await self.call(
            "POST", f"/sessions/{session}/v1/chat/completions", {"messages": list(messages), **fields}
        )

    async def turn(self, session: str, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        status, body = await self.try_turn(session, messages, **fields)
        assert status == 200, body
        return dict(body)

    async def show(self, session: str) -> dict[str, Any]:
        status, body = await self.call("GET", f"/sessions/{session}")
        assert status == 200, body
        return dict(body)

    async def turns(self, session: str) -> list[str]:
        """Response ids in the order of commits."""
        return [node["response_id"] for node in (await self.show(session))["tree"]["nodes"]]

    async def parents(self, session: str) -> list[int | None]:
        return [node["parent"] for node in (await self.show(session))["tree"]["nodes"]]

    async def rows(self, session: str, **asked: Any) -> list[Sample]:
        status, body = await self.call("POST", f"/sessions/{session}/samples", asked)
        assert status == 200, body
        return decode_rows(body)[0]

    async def metrics(self) -> dict[str, float]:
        page = (await self.call("GET", "/metrics"))[1].decode()
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {name.removeprefix("miles_norm_session_"): float(value) for name, value in lines}


@asynccontextmanager
async def connected(address: str, key: str | None = None) -> AsyncIterator[Api]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as http:
        yield Api(http, address)


async def ask(base_url: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    """A turn as an agent takes it, below the address of its session."""
    async with connected(base_url) as api:
        status, body = await api.call("POST", "/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, body
        return dict(body)


@asynccontextmanager
async def served(engine: Engine | None = None, **settings: Any) -> AsyncIterator[Api]:
    """A server on a free port while the block runs, and its client."""
    config = ServerConfig(port=0, **settings)
    async with running_server(engine or ScriptedEngine(), config) as address, connected(address, config.api_key) as api:
        yield api


async def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait for what happens in other tasks; a condition may be async."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.005)
