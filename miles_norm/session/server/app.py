"""The routes of the session server.

    POST   /sessions                            a new session: {"session_id": ...}
    GET    /sessions/{id}                       its turns and leaves
    DELETE /sessions/{id}                       forget it
    POST   /sessions/{id}/v1/chat/completions   one turn, streamed or not
    POST   /sessions/{id}/samples               its training rows, as safetensors
    GET    /health, /metrics

An agent uses it as any OpenAI server, with a ``base_url`` that ends in ``/sessions/{id}/v1``.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from miles_norm.errors import MilesNormError, TooLargeError, UnauthorizedError
from miles_norm.session.assembly import session_metadata
from miles_norm.session.server.chat import ChatRequest, chat_answer, stream_events
from miles_norm.session.server.errors import error_answer
from miles_norm.session.server.samples import NewSession, SamplesRequest, read_body, session_rows
from miles_norm.session.server.sessions import Sessions
from miles_norm.session.wire import encode_rows

__all__ = ["session_app"]

_Endpoint = Callable[[Request], Awaitable[Response]]


def session_app(sessions: Sessions) -> Starlette:
    """The application, for ``serve`` or any other ASGI server."""
    handlers = _Handlers(sessions)
    routes = [
        ("/sessions", "POST", handlers.create),
        ("/sessions/{session_id}", "GET", handlers.show),
        ("/sessions/{session_id}", "DELETE", handlers.delete),
        ("/sessions/{session_id}/v1/chat/completions", "POST", handlers.complete),
        ("/sessions/{session_id}/samples", "POST", handlers.samples),
        ("/metrics", "GET", handlers.metrics),
    ]
    guarded = [Route(path, handlers.guarded(endpoint), methods=[method]) for path, method, endpoint in routes]
    return Starlette(routes=[Route("/health", handlers.health), *guarded])


class _Handlers:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._config = sessions.config

    def guarded(self, endpoint: _Endpoint) -> _Endpoint:
        """The endpoint behind the key, its errors as answers."""

        async def answer(request: Request) -> Response:
            try:
                self._check_key(request)
                return await endpoint(request)
            except MilesNormError as error:
                self._sessions.metrics.errors.labels(type(error).__name__).inc()
                return error_answer(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return answer

    async def health(self, request: Request) -> Response:
        ready = await self._sessions.engine.health()
        state = {"status": "ok" if ready else "engine unavailable", "sessions": len(self._sessions)}
        return JSONResponse(state, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._sessions.metrics.page(), media_type="text/plain; version=0.0.4")

    async def create(self, request: Request) -> Response:
        asked = read_body(NewSession, await self._body(request))
        session = await self._sessions.create(asked.metadata)
        return JSONResponse({"session_id": session.session_id}, 201)

    async def show(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session_id"])
        described = {
            "session_id": session.session_id,
            "created_at": session.created_at,
            "metadata": session.metadata,
            "in_flight": session.in_flight,
        }
        return JSONResponse(described | session_metadata(session.forest))

    async def delete(self, request: Request) -> Response:
        await self._sessions.delete(request.path_params["session_id"])
        return Response(status_code=204)

    async def complete(self, request: Request) -> Response:
        asked = ChatRequest.read(await self._body(request))
        turn = self._sessions.complete(request.path_params["session_id"], asked)
        node = await _while_connected(request, turn)
        renderer = self._sessions.engine.renderer
        if asked.stream:
            events = stream_events(node, asked, renderer)
            return StreamingResponse(
                _each(events), media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )
        return JSONResponse(chat_answer(node, asked, renderer))

    async def samples(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session_id"])
        asked = read_body(SamplesRequest, await self._body(request))
        rows = session_rows(session, asked)
        self._sessions.metrics.rows.inc(len(rows))
        return Response(encode_rows(rows), media_type="application/octet-stream")

    def _check_key(self, request: Request) -> None:
        key = self._config.api_key
        given = request.headers.get("authorization", "")
        if key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return
        raise UnauthorizedError(
            "key of the request",
            got="another one" if given else "none",
            expected="the header 'Authorization: Bearer KEY' with the api_key of this server",
            reason="whoever reaches the server can use the engine",
            remedy="pass the key, to OpenAI's client as api_key",
        )

    async def _body(self, request: Request) -> bytes:
        limit = self._config.max_body_bytes
        declared = int(request.headers.get("content-length") or 0)
        body = bytearray()
        if declared <= limit:
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        raise TooLargeError(
            "body of the request",
            got=f"{max(declared, len(body))} bytes or more",
            expected=f"at most max_body_bytes = {limit}",
            reason="requests are held in memory",
            remedy="send less, or raise max_body_bytes",
        )


async def _while_connected(request: Request, turn: Any) -> Any:
    """The result of a turn, which is cancelled when its client leaves."""
    work = asyncio.ensure_future(turn)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


async def _each(events: Any) -> Any:
    for event in events:
        yield event
