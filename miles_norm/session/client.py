"""What a rollout driver asks of a session server: a session, its rows, and that it is forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from miles_norm.errors import DumpError, RequestError, SessionError, shown
from miles_norm.samples import Sample
from miles_norm.session.addresses import http_address
from miles_norm.session.wire import decode_rows

__all__ = ["SessionClient", "connect"]

_TIMEOUT = aiohttp.ClientTimeout(total=300, sock_connect=10)
_LONGEST_PAUSE = 5.0


class SessionClient:
    """Requests to a session server, repeated while it does not answer or fails; made by ``connect``."""

    def __init__(self, http: aiohttp.ClientSession, server: str, retries: int) -> None:
        self.server = http_address(server, "session server")
        self._http, self._retries = http, retries

    def base_url(self, session_id: str) -> str:
        """Where an agent finds its session: OpenAI's routes are at ``/v1`` below it."""
        return f"{self.server}/sessions/{session_id}"

    async def create(self, metadata: Mapping[str, Any]) -> str:
        """Id of a new session.

        Raises:
            RequestError: the server refused.
            SessionError: it did not answer, or failed, after all retries.
        """
        answer = await self._request("POST", "/sessions", {"metadata": metadata})
        try:
            session_id: str = json.loads(answer)["session_id"]
        except (ValueError, LookupError, TypeError):
            said = f"a body that names no session: {shown(answer[:100])}"
            raise self._error(SessionError, "POST", "/sessions", said) from None
        return session_id

    async def rows(self, session_id: str, asked: Mapping[str, Any]) -> list[Sample]:
        """Training rows of a session.

        Raises:
            RequestError: the server refused, as what was asked does not fit the session.
            SessionError: it did not answer, or failed, after all retries.
        """
        path = f"/sessions/{session_id}/samples"
        try:
            return decode_rows(await self._request("POST", path, asked))[0]
        except DumpError as error:
            raise self._error(SessionError, "POST", path, f"a body that holds no rows: {error.got}") from error

    async def forget(self, session_id: str) -> None:
        """Delete a session; one that cannot be deleted is left to expire."""
        with suppress(SessionError):
            await self._request("DELETE", f"/sessions/{session_id}")

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        said = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(0.1 * 2 ** min(attempt, 10), _LONGEST_PAUSE))
            try:
                async with self._http.request(method, self.server + path, data=data) as answer:
                    content = await answer.read()
            except ValueError as error:  # A key that is no header, say: it would be no better the next time.
                raise self._error(SessionError, method, path, f"{type(error).__name__}: {error}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
                continue
            if answer.status < 400:
                return content
            said = f"status {answer.status}: {_message(content)}"
            if answer.status < 500 and answer.status != 429:
                raise self._error(RequestError, method, path, said)
        raise self._error(SessionError, method, path, said)

    def _error(self, kind: type[SessionError], method: str, path: str, said: str) -> SessionError:
        return kind(
            f"{method} {self.server}{path}",
            got=said,
            expected="what a session server answers",
            reason="turns are recorded there, and rows made of them",
            remedy="see whether it runs, and what it says; miles-norm serve and running_server print its address",
        )


@asynccontextmanager
async def connect(
    server: str, *, api_key: str | None = None, connections: int = 64, retries: int = 5
) -> AsyncIterator[SessionClient]:
    """A client of the session server at an address such as ``http://127.0.0.1:8811``.

    Raises:
        ConfigError: it is no such address.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=_TIMEOUT) as http:
        yield SessionClient(http, server, retries)


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content[:2000].decode(errors="replace")
