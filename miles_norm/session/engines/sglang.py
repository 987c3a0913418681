"""An SGLang server as the engine, over HTTP.

The client is aiohttp: on two cores it takes 0.13 ms a call where httpx takes 0.58, and carries 10,000 calls a second
where httpx carries 700; bare asyncio streams would take 0.04 ms and carry 27,000 (``benchmarks/http_clients.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_norm.errors import ConfigError, EngineRejectedError, EngineUnavailableError, shown
from miles_norm.session.addresses import http_address
from miles_norm.session.completion import Completion
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.engines.sglang_answer import broken, read_completion
from miles_norm.session.extras import import_extra
from miles_norm.session.rendering import Renderer

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = import_extra("aiohttp", "client of an SGLang server")

__all__ = ["SGLangEngine"]

# A server's own defaults come from the model's generation_config.json. Each of these would make it sample from
# something else than the distribution whose log-probs it returns.
_PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_CONNECT_S, _HEALTH_S = 10.0, 10.0
# uvicorn closes an idle connection after 5 s; one that is closed while it is taken up again costs the request.
_KEEP_ALIVE_S = 2.0
# Part of the answer to an update that met a request in its last moments, such as a health check or one that was
# aborted: the weights are new, while what was cached under the old ones, and their version, are still there.
_NOT_FLUSHED = "the cache was not flushed"
_FLUSH_S, _FLUSH_PAUSE_S = 60.0, 0.05


class SGLangEngine:
    """Client of an SGLang server, or of a router before several.

    Prompts are sent as ``input_ids``, with the messages beside them, which the server wants to see. Sampling parameters
    are always sent, since the server's own defaults are the model's. The log-probs are the server's: at the temperature
    of the request, unless it runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``.

    When the task that waits is cancelled its connection is closed. The server looks for that every 4 seconds
    (``SGLANG_REQUEST_STATE_WAIT_TIMEOUT``), and then stops the generation.

    Args:
        url: Of the server or router, such as ``http://127.0.0.1:30000``.
        renderer: Chat template and tokenizer of the model that it serves.
        model: Its name there, which routers go by; the one that ``/v1/models`` lists by default.
        workers: Addresses of the servers behind a router, which itself passes no weights on.
        timeout_s: Longest that a generation or an update of the weights may take.
        max_connections: More requests than this wait for one to finish.
        api_key: Sent as bearer token.
        routed_experts: Layers and top-k of a mixture-of-experts model whose routing is to be recorded.

    Raises:
        ConfigError: a URL that is not ``http://`` or ``https://`` and a host.
    """

    def __init__(
        self,
        url: str,
        renderer: Renderer,
        *,
        model: str | None = None,
        workers: Sequence[str] = (),
        timeout_s: float = 900.0,
        max_connections: int = 1024,
        api_key: str | None = None,
        routed_experts: tuple[int, int] | None = None,
    ) -> None:
        self.renderer = renderer
        self._url, self._model = http_address(url, "engine"), model
        self._workers = [http_address(worker, "worker") for worker in workers]
        self._timeout_s, self._max_connections = timeout_s, max_connections
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._routed_experts = routed_experts
        self._prompt_is_read = False
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool of connections; the server may come up later."""
        connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        """Close all connections, at which the server stops what it samples for them."""
        if self._session is not None:
            await self._session.close()

    async def health(self) -> bool:
        """Whether a router has workers, or a server says 200 within 10 seconds; it may sample a token, which takes one.

        A router's ``/health`` speaks of the router alone; ``/readiness``, which a server does not have, of its workers.
        """
        try:
            status, _ = await self._call("GET", f"{self._url}/readiness", timeout_s=_HEALTH_S)
            if status == 404:
                status, _ = await self._call("GET", f"{self._url}/health", timeout_s=_HEALTH_S)
        except EngineUnavailableError:
            return False
        return status == 200

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        The first answers are checked token by token for the prompt that was sent, the later ones by its length.

        Raises:
            EngineUnavailableError: no connection, no answer in time, or a status from 500.
            EngineRejectedError: another status than 200, which it carries with the body.
            EngineContractError: an answer without tokens or log-probs, or to another prompt.
            ConfigError: several models are served, and none was named.
        """
        if self._model is None:
            self._model = await self._served_model()
        body = self._body(request)
        if not self._prompt_is_read:
            body["return_prompt_token_ids"] = True
        headers = {"X-SMG-Routing-Key": request.routing_key} if request.routing_key else {}
        answer = await self._json("POST", f"{self._url}/v1/chat/completions", body, headers)
        completion = read_completion(answer, request, self._routed_experts)
        self._prompt_is_read = True
        return completion

    async def update_weights(self, path: str | os.PathLike[str], weight_version: str) -> None:
        """Have the server, or all workers at once, load a model folder that they can read under this path.

        An update that a server could not finish, since some request was just ending, is repeated for up to a minute.

        Raises:
            EngineUnavailableError, EngineRejectedError: as ``generate``; the old weights stay where that happened. Of
                several workers the others have the new ones, and each completion names those that it was sampled with.
        """
        body = {"model_path": os.fspath(path), "weight_version": weight_version, "flush_cache": True}
        servers = self._workers or [self._url]
        failures = await asyncio.gather(*(self._update(server, body) for server in servers), return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    async def _update(self, server: str, body: dict[str, Any]) -> None:
        deadline = time.monotonic() + _FLUSH_S
        while True:
            try:
                answer = await self._json("POST", f"{server}/update_weights_from_disk", body)
            except EngineRejectedError as refusal:
                if _NOT_FLUSHED not in refusal.body or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_FLUSH_PAUSE_S)
                continue
            if not isinstance(answer, Mapping) or answer.get("success") is not True:
                raise EngineRejectedError.of_answer(400, json.dumps(answer))
            return

    async def _served_model(self) -> str:
        answer = await self._json("GET", f"{self._url}/v1/models")
        listed = answer.get("data") if isinstance(answer, Mapping) else None
        # An adapter is listed too, and names the model that it belongs to.
        names = [str(entry["id"]) for entry in listed or () if entry.get("parent") is None]
        if not names:
            raise _unavailable(f"{self._url}/v1/models", "no model")
        if len(names) > 1:
            raise ConfigError(
                f"model of the engine at {self._url}",
                got=f"none named, and {', '.join(names)} there",
                expected="the name of one",
                reason="a router sends a request to the workers of the model that it names",
                remedy="name it: SGLangEngine(url, renderer, model=...)",
            )
        return names[0]

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            **_PLAIN_SAMPLING,
            **request.extra,
            "model": self._model,
            "messages": list(request.messages),
            "input_ids": request.token_ids.tolist(),
            "logprobs": True,
            "return_meta_info": True,
            "stream": False,
            "temperature": request.temperature,
            "top_p": request.top_p,
        }
        optional = {
            "tools": list(request.tools) if request.tools else None,
            "max_tokens": request.max_tokens,
            "stop": list(request.stop) or None,
            "seed": request.seed,
            "return_routed_experts": self._routed_experts and True,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    async def _json(
        self, method: str, url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        status, text = await self._call(method, url, body=body, headers=headers, timeout_s=self._timeout_s)
        if status >= 500:
            raise _unavailable(url, f"HTTP status {status}: {shown(text, 300)}")
        if status != 200:
            raise EngineRejectedError.of_answer(status, text)
        try:
            return json.loads(text)
        except ValueError as error:
            raise broken(shown(text, 200), "JSON", "see what answers at this address") from error

    async def _call(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        if self._session is None or self._session.closed:
            raise _unavailable(url, "a client that is not started, or closed")
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
            raise _unavailable(url, str(error) or f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unavailable(url, f"{type(error).__name__}: {error}") from error


def _unavailable(url: str, got: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"engine at {url}",
        got=got,
        expected="an SGLang server that answers",
        reason="completions are sampled there",
        remedy="see whether it runs and what its log says, then send the request again",
    )
