"""JSON over HTTP to SGLang servers and routers, and what their failures mean.

The client is aiohttp: on two cores it takes 0.13 ms a call where httpx takes 0.58, and carries 10,000 calls a second
where httpx carries 700; bare asyncio streams would take 0.04 ms and carry 27,000 (``benchmarks/http_clients.py``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from miles_norm.errors import EngineRejectedError, EngineUnavailableError, shown
from miles_norm.session.engines.sglang_answer import broken
from miles_norm.session.extras import import_extra

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = import_extra("aiohttp", "client of an SGLang server")

__all__ = ["ADDRESS", "JsonClient", "unavailable"]

ADDRESS = "see what answers at this address, and whether it asks for a key"
"""What to do about answers that no SGLang server gives."""

_CONNECT_S = 10.0
# uvicorn closes an idle connection after 5 s; one that is closed while it is taken up again costs the request.
_KEEP_ALIVE_S = 2.0


class JsonClient:
    """A pool of connections.

    Args:
        timeout_s: Longest that an answer may take, where a call says nothing else.
        max_connections: More requests than this wait for one to finish.
        api_key: Sent as bearer token.
    """

    def __init__(self, timeout_s: float, max_connections: int, api_key: str | None) -> None:
        self._timeout_s, self._max_connections = timeout_s, max_connections
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool, on the loop that uses it."""
        connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def json(
        self, method: str, url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        """What is answered with status 200, parsed.

        Raises:
            EngineUnavailableError: no connection, no answer in time, or a status from 500.
            EngineRejectedError: a status from 400, which it carries with the body.
            EngineContractError: another status than 200, or no JSON.
        """
        status, text = await self.call(method, url, body=body, headers=headers)
        if status >= 500:
            raise unavailable(url, f"HTTP status {status}: {shown(text, 300)}")
        if status >= 400:
            raise EngineRejectedError.of_answer(status, text)
        if status != 200:
            raise broken(f"HTTP status {status} of {url}", "status 200", ADDRESS)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise broken(shown(text, 200), "JSON", ADDRESS) from error

    async def call(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float | None = None,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and body of any answer.

        Raises:
            EngineUnavailableError: no connection, or no answer in time.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self._session is None or self._session.closed:
            raise unavailable(url, "a client that is not started, or closed")
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method,
                url,
                data=data,
                timeout=timeout,
                headers={"Content-Type": "application/json", **(headers or {})},
            ) as answer:
                return answer.status, (await answer.read()).decode("utf-8", "replace")
        except TimeoutError as error:
            # A connection that is not made in time has a text of its own.
            raise unavailable(url, str(error) or f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise unavailable(url, f"{type(error).__name__}: {error}") from error


def unavailable(url: str, got: str) -> EngineUnavailableError:
    """The error for a server that does not answer."""
    return EngineUnavailableError(
        f"engine at {url}",
        got=got,
        expected="an SGLang server that answers",
        reason="completions are sampled there",
        remedy="see whether it runs and what its log says, then send the request again",
    )
