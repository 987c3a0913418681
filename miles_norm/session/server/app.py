"""The routes of the session server.

    POST   /sessions                            a new session: {"session_id": ...}
    GET    /sessions/{id}                       its turns and leaves
    DELETE /sessions/{id}                       forget it
    POST   /sessions/{id}/v1/chat/completions   one turn, streamed or not
    POST   /sessions/{id}/samples               its training rows, as safetensors
    GET    /health, /metrics
    GET    /ui                                  a page that shows sessions; /ui/data[/{number}] is what it asks for

An agent uses it as any OpenAI server, with a ``base_url`` that ends in ``/sessions/{id}/v1``.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_norm.errors import MilesNormError, TooLargeError, UnauthorizedError
from miles_norm.session.assembly import session_metadata
from miles_norm.session.node import Node
from miles_norm.session.server.answers import error_answer, json_answer
from miles_norm.session.server.chat import chat_answer, stream_events
from miles_norm.session.server.requests import ChatRequest, NewSession, SamplesRequest, read_body
from miles_norm.session.server.samples import session_rows
from miles_norm.session.server.sessions import Sessions
from miles_norm.session.server.ui import ui_routes
from miles_norm.session.server.viewing import Viewer
from miles_norm.session.wire import encode_rows

__all__ = ["session_app"]

logger = logging.getLogger("miles_norm")


def session_app(sessions: Sessions) -> Starlette:
    """The application, for ``running_server`` or any other ASGI server."""
    handlers = _Handlers(sessions)
    routes = [
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics),
        Route("/sessions", handlers.create, methods=["POST"]),
        Route("/sessions/{session_id}", handlers.show, methods=["GET"]),
        Route("/sessions/{session_id}", handlers.delete, methods=["DELETE"]),
        Route("/sessions/{session_id}/v1/chat/completions", handlers.complete, methods=["POST"]),
        Route("/sessions/{session_id}/samples", handlers.samples, methods=["POST"]),
    ]
    if handlers.viewer is not None:
        routes += ui_routes(handlers.viewer, sessions.config)
    failures = (MilesNormError, HTTPException, ClientDisconnect, Exception)
    return Starlette(
        routes=routes,
        middleware=[Middleware(_KeyCheck, sessions=sessions)],
        exception_handlers=dict.fromkeys(failures, handlers.failed),
    )


class _KeyCheck:
    """Lets requests pass that bear the key, and those to /health and the page /ui, which say nothing of any session."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app, self._sessions = app, sessions
        key = sessions.config.api_key
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._expected is not None and scope["path"] not in ("/health", "/ui"):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                error = _unauthorized(given)
                self._sessions.metrics.failed(error)
                await error_answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Handlers:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._config = sessions.config
        self.viewer = Viewer(sessions) if sessions.config.ui else None

    async def failed(self, request: Request, error: Exception) -> Response:
        self._sessions.metrics.failed(error)
        answer = error_answer(error)
        if answer.status_code >= 500 and isinstance(error, MilesNormError):  # Others are logged with their traceback.
            logger.warning("answered %d: %s: got %s", answer.status_code, error.subject, error.got)
        return answer

    async def health(self, request: Request) -> Response:
        ready = await self._sessions.engine.health()
        state = {"status": "ok" if ready else "engine unavailable", "sessions": len(self._sessions)}
        return json_answer(state, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._sessions.metrics.page(), media_type="text/plain; version=0.0.4")

    async def create(self, request: Request) -> Response:
        asked = read_body(NewSession, await self._body(request))
        session = await self._sessions.create(asked.metadata)
        return json_answer({"session_id": session.session_id}, 201)

    async def show(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session_id"])
        described = {
            "session_id": session.session_id,
            "created_at": session.created_at,
            "metadata": session.metadata,
            "in_flight": session.in_flight,
        }
        return json_answer(described | session_metadata(session.forest))

    async def delete(self, request: Request) -> Response:
        await self._sessions.delete(request.path_params["session_id"])
        return Response(status_code=204)

    async def complete(self, request: Request) -> Response:
        asked = read_body(ChatRequest, await self._body(request))
        node = await _while_connected(request, self._sessions.complete(request.path_params["session_id"], asked))
        renderer = self._sessions.engine.renderer
        if asked.stream:
            # The whole reply is there, so the events are written at once.
            return Response(b"".join(stream_events(node, asked, renderer)), media_type="text/event-stream")
        return json_answer(chat_answer(node, asked, renderer))

    async def samples(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session_id"])
        asked = read_body(SamplesRequest, await self._body(request))
        rows = session_rows(session, asked, self._sessions.engine.renderer)
        self._sessions.metrics.rows.inc(len(rows))
        if self.viewer is not None:
            self.viewer.collected(session, asked, rows)
        return Response(encode_rows(rows), media_type="application/octet-stream")

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
            got=f"{declared} bytes" if declared else f"more than {limit} bytes",
            expected=f"at most max_body_bytes = {limit}",
            reason="requests are held in memory",
            remedy="send less, or raise max_body_bytes",
        )


async def _while_connected(request: Request, turn: Coroutine[Any, Any, Node]) -> Node:
    """The result of a turn, which is cancelled when its client leaves."""
    work = asyncio.create_task(turn)
    gone = asyncio.ensure_future(request.receive())  # The body has been read: what comes next is the end.
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _unauthorized(given: bytes) -> UnauthorizedError:
    return UnauthorizedError(
        "key of the request",
        got="another one" if given else "none",
        expected="the header 'Authorization: Bearer KEY' with the api_key of this server",
        reason="whoever reaches the server can use the engine",
        remedy="pass the key, to OpenAI's client as api_key",
    )
