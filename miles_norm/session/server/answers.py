"""Values and errors as HTTP answers; errors have the form of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from miles_norm.errors import (
    EngineContractError,
    EngineRejectedError,
    EngineUnavailableError,
    JournalError,
    MilesNormError,
    NodeLimitError,
    PathEndedError,
    RenderingError,
    RequestError,
    SessionError,
    SessionLimitError,
    TooLargeError,
    UnauthorizedError,
    UnknownSessionError,
)

__all__ = ["KINDS", "ending_answer", "error_answer", "json_answer", "to_json"]

KINDS: tuple[tuple[type[MilesNormError], int, bool, str], ...] = (
    (UnauthorizedError, 401, False, "authentication_error"),
    (TooLargeError, 413, False, "invalid_request_error"),
    (UnknownSessionError, 404, False, "not_found_error"),
    (PathEndedError, 409, False, "conflict_error"),
    (NodeLimitError, 409, False, "conflict_error"),
    (SessionLimitError, 429, True, "rate_limit_error"),
    (RequestError, 400, False, "invalid_request_error"),
    (RenderingError, 400, False, "invalid_request_error"),
    (SessionError, 422, False, "invalid_request_error"),
    (EngineUnavailableError, 502, True, "engine_error"),
    (EngineContractError, 502, False, "engine_error"),
    # Room may be made, but until then each repetition would sample a reply for nothing.
    (JournalError, 507, False, "journal_error"),
    (MilesNormError, 500, False, "internal_error"),
)
"""The first that fits says the status, whether the same request may succeed later, and OpenAI's name for the kind."""

_NO_ROUTE = (
    "no such route: each rollout has an endpoint of its own, so that a base_url ends in /sessions/SESSION_ID/v1; "
    "POST /sessions answers with a new session_id"
)

# Escapes whatever is not ASCII, so that a lone surrogate in a reply does not fail when it has been recorded already.
to_json = json.JSONEncoder(separators=(",", ":")).encode


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(to_json(value).encode(), status, headers, media_type="application/json")


def error_answer(error: Exception) -> Response:
    """The answer to a request that failed.

    What an engine refused is passed on as it answered. ``x-should-retry`` says whether to send the same request again,
    which OpenAI's clients obey; they would repeat a 409 otherwise.
    """
    if isinstance(error, EngineRejectedError):
        return Response(_passed_on(error), error.status, media_type="application/json")
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # Nobody reads it.
    if isinstance(error, HTTPException):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        detail = _NO_ROUTE if error.detail == HTTPStatus.NOT_FOUND.phrase else error.detail
        body = _body(detail, kind, error)
        return json_answer(body, error.status_code, {**(error.headers or {}), "x-should-retry": "false"})
    for cls, status, again, kind in KINDS:
        if isinstance(error, cls):
            return json_answer(_body(_line(error), kind, error), status, {"x-should-retry": str(again).lower()})
    body = _body("an error of the server; its log has more", "internal_error", error)
    # The server closes the connection of a request that raised; a client that does not know would use it again.
    return json_answer(body, 500, {"x-should-retry": "false", "connection": "close"})


def ending_answer() -> Response:
    """The answer to a request that the server does not wait for any longer."""
    message = "the server is ending, and did not wait for this request; nothing of it was recorded"
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": "ServerEnding"}}
    return json_answer(body, 503, {"x-should-retry": "true", "connection": "close"})


def _line(error: MilesNormError) -> str:
    """The parts of an error on one line: clients put it into messages of their own."""
    return f"{error.subject}: {error.got}; expected {error.expected}: {error.reason}. To mend it: {error.remedy}"


def _body(message: str, kind: str, error: Exception) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": type(error).__name__}}


def _passed_on(error: EngineRejectedError) -> bytes:
    try:
        json.loads(error.body)
    except ValueError:
        return to_json({"error": {"message": error.body or str(error), "type": "engine_error"}}).encode()
    return error.body.encode()
