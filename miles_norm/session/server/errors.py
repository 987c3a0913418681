"""Errors as HTTP answers of OpenAI's form."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse, Response

from miles_norm.errors import (
    EngineContractError,
    EngineRejectedError,
    EngineUnavailableError,
    HookError,
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

__all__ = ["error_answer"]

# The first that fits: a status, whether the same request may succeed later, and OpenAI's name for the kind.
_KINDS: tuple[tuple[type[MilesNormError], int, bool, str], ...] = (
    (UnauthorizedError, 401, False, "authentication_error"),
    (TooLargeError, 413, False, "invalid_request_error"),
    (UnknownSessionError, 404, False, "not_found_error"),
    (PathEndedError, 409, False, "conflict_error"),
    (NodeLimitError, 409, False, "conflict_error"),
    (SessionLimitError, 429, True, "rate_limit_error"),
    (HookError, 422, False, "invalid_request_error"),
    (RequestError, 400, False, "invalid_request_error"),
    (RenderingError, 400, False, "invalid_request_error"),
    (EngineUnavailableError, 502, True, "engine_error"),
    (EngineContractError, 502, False, "engine_error"),
    (JournalError, 507, False, "journal_error"),
    (SessionError, 422, False, "invalid_request_error"),
)


def error_answer(error: MilesNormError) -> Response:
    """The answer to a request that failed.

    What an engine refused is passed on as it answered. ``x-should-retry`` says whether the same request may succeed
    later, which OpenAI's clients obey; they would repeat a 409 otherwise.
    """
    if isinstance(error, EngineRejectedError):
        return Response(_passed_on(error), error.status, media_type="application/json")
    status, again, kind = next(
        ((status, again, kind) for cls, status, again, kind in _KINDS if isinstance(error, cls)),
        (400, False, "invalid_request_error"),
    )
    body = {"error": {"message": str(error), "type": kind, "param": None, "code": type(error).__name__}}
    return JSONResponse(body, status, headers={"x-should-retry": "true" if again else "false"})


def _passed_on(error: EngineRejectedError) -> bytes:
    try:
        json.loads(error.body)
    except ValueError:
        return json.dumps({"error": {"message": error.body or str(error), "type": "engine_error"}}).encode()
    return error.body.encode()
