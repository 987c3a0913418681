"""An SGLang server without a model: real HTTP, the fields and errors of version 0.5.23, and faults on demand.

What it samples is scripted. Fields that a request does not ask for are left out of the answer, as the real one does.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from miles_norm.session.completion import Completion
from miles_norm.session.engines.chatml import ChatMLRenderer
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.engines.sglang import SGLangEngine

T = TypeVar("T")
RENDERER = ChatMLRenderer()
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = np.array(RENDERER.encode(RENDERER.render(MESSAGES, add_generation_prompt=True)), dtype=np.int32)
END_OF_TURN = 258
ROUTER_FIELDS = (
    "model",
    "messages",
    "tools",
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "seed",
    "logprobs",
    "stream",
)


@dataclass
class FakeSGLang:
    """The server, its script, and what it saw."""

    token_ids: list[int] = field(default_factory=lambda: [104, 105, END_OF_TURN])
    text: str = "hi"
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str = "stop"
    experts: np.ndarray | None = None
    seconds: float = 0.0
    """How long sampling takes."""
    router: str = "none"
    """``fixed fields``: what is not in ROUTER_FIELDS is dropped. ``retokenized``: only input_ids is."""
    broken: str = ""
    """A status, or ``cut``, ``no json``, or the name of a field to leave out of the answer."""
    weight_version: str = "default"
    unflushed: int = 0
    """Updates of the weights that meet a request which is just ending."""
    models: Any = field(default_factory=lambda: [{"id": "tiny", "parent": None}])
    tokenize: Callable[[str], list[int]] | None = ChatMLRenderer().encode
    """Of its model; None: a router without this route."""
    ready_workers: int | None = None
    """Of a router; None: a server."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    stopped: int = 0
    """Generations whose client went away."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.router == "fixed fields":
            body = {name: value for name, value in body.items() if name in ROUTER_FIELDS}
        elif self.router == "retokenized":
            body = {name: value for name, value in body.items() if name != "input_ids"}
        if not body.get("messages"):
            return refusal(400, "Messages cannot be empty.")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        finally:
            self.running -= 1
        if self.broken.isdigit():
            return refusal(int(self.broken), "as scripted")
        answer = json.dumps(self.answer(body)).encode()
        if self.broken == "cut":
            response = web.StreamResponse(headers={"Content-Length": str(len(answer))})
            await response.prepare(request)
            await response.write(answer[:40])
            request.transport.abort()  # type: ignore[union-attr]
            return response
        return web.Response(body=b"<html>" if self.broken == "no json" else answer, content_type="application/json")

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        # Without input_ids the prompt is the messages, rendered and tokenized here: as many tokens, other ones.
        prompt = body.get("input_ids") or [7] * len(self.bodies[-1]["input_ids"])
        reason: dict[str, Any] = {"type": self.finish_reason}
        if self.finish_reason in ("stop", "tool_calls"):
            reason = {"type": "stop", "matched": END_OF_TURN}
        meta = {
            "id": "rid-1",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.weight_version,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[log_prob(k), token, "x"] for k, token in enumerate(self.token_ids)],
        }
        if self.finish_reason == "abort" and not self.token_ids:
            # What the real one says of a request that was still waiting.
            meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
            del meta["prompt_tokens"], meta["cached_tokens"]
        if self.experts is not None and body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(self.experts.tobytes()).decode()
        if not body.get("logprobs"):
            del meta["output_token_logprobs"]
        meta.pop(self.broken, None)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text, "reasoning_content": None},
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "matched_stop": reason.get("matched"),
        }
        if self.tool_calls:
            choice["message"]["tool_calls"] = self.tool_calls  # type: ignore[index]
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = prompt
        if body.get("return_meta_info"):
            choice["meta_info"] = meta
        choice.pop(self.broken, None)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self.token_ids)}
        return {"id": "rid-1", "object": "chat.completion", "model": "default", "choices": [choice], "usage": usage}

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.broken:
            return web.json_response({"success": False, "message": "no such folder"}, status=int(self.broken))
        if self.unflushed:
            self.unflushed -= 1
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running or queued."
            )
            return web.json_response({"success": False, "message": message}, status=400)
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def tokens(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.tokenize is None:
            return web.Response(status=404)
        assert body["add_special_tokens"] is False
        tokens = self.tokenize(body["prompt"])
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 16384})

    async def list_models(self, request: web.Request) -> web.Response:
        if isinstance(self.models, int):
            return refusal(self.models, "as scripted")
        return web.json_response({"object": "list", "data": self.models})

    async def readiness(self, request: web.Request) -> web.Response:
        status = 404 if self.ready_workers is None else 200 if self.ready_workers else 503
        return web.Response(status=status)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=int(self.broken or 200))


def log_prob(position: int) -> float:
    return -0.125 - position


def refusal(status: int, message: str) -> web.Response:
    body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response(body, status=status)


@asynccontextmanager
async def serving(server: FakeSGLang, port: int = 0) -> AsyncIterator[FakeSGLang]:
    """The server on a port of 127.0.0.1, a free one by default; its ``url`` is set."""
    app = web.Application(client_max_size=2**26)
    app.add_routes([
        web.post("/v1/chat/completions", server.chat),
        web.post("/update_weights_from_disk", server.update),
        web.get("/v1/models", server.list_models),
        web.post("/tokenize", server.tokens),
        web.get("/readiness", server.readiness),
        web.get("/health", server.health),
    ])  # fmt: skip
    # Handlers are cancelled when the client goes away, as SGLang aborts the request then.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


def ask(**settings: Any) -> GenerationRequest:
    """A request."""
    return GenerationRequest(**{"token_ids": PROMPT, "messages": MESSAGES} | settings)


def run(server: FakeSGLang, use: Callable[[SGLangEngine], Awaitable[T]], **settings: Any) -> T:
    """What comes of using a client of the server."""

    async def served() -> T:
        async with serving(server):
            engine = SGLangEngine(server.url, RENDERER, **settings)
            await engine.start()
            try:
                return await use(engine)
            finally:
                await engine.close()

    return asyncio.run(served())


def generate(server: FakeSGLang, request: GenerationRequest | None = None, **settings: Any) -> Completion:
    return run(server, lambda engine: engine.generate(request or ask()), **settings)
