"""An SGLang server as the engine, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_norm.errors import ConfigError, EngineContractError, EngineRejectedError, EngineUnavailableError, shown
from miles_norm.session.addresses import http_address
from miles_norm.session.completion import Completion
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.engines.sglang_answer import broken, read_completion
from miles_norm.session.engines.sglang_http import ADDRESS, JsonClient, unavailable
from miles_norm.session.rendering import Renderer

__all__ = ["SGLangEngine"]

# A server's own defaults come from the model's generation_config.json. Each of these would make it sample from
# something else than the distribution whose log-probs it returns.
_PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_HEALTH_S = 10.0
# Part of the answer to an update that met a request in its last moments, such as a health check or one that was
# aborted: the weights are new, while what was cached under the old ones, and their version, are still there.
_NOT_FLUSHED = "the cache was not flushed"
_FLUSH_S, _FLUSH_PAUSE_S = 60.0, 0.05
# Characters of the first prompt that tokenizers are compared by.
_TOKENIZED = 2000


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
        ConfigError: a URL that is not ``http://`` or ``https://``, a host and perhaps a port and a path.
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
        self._client = JsonClient(timeout_s, max_connections, api_key)
        self._routed_experts = routed_experts
        self._prompt_is_read = self._tokenizer_is_known = False

    async def start(self) -> None:
        """Open the pool of connections; the server may come up later."""
        await self._client.start()

    async def close(self) -> None:
        """Close all connections, at which the server stops what it samples for them."""
        await self._client.close()

    async def health(self) -> bool:
        """Whether a router has workers, or a server says 200 within 10 seconds; it may sample a token, which takes one.

        A router's ``/health`` speaks of the router alone; ``/readiness``, which a server does not have, of its workers.
        """
        try:
            status, _ = await self._client.call("GET", f"{self._url}/readiness", timeout_s=_HEALTH_S)
            if status == 404:
                status, _ = await self._client.call("GET", f"{self._url}/health", timeout_s=_HEALTH_S)
        except EngineUnavailableError:
            return False
        return status == 200

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Before the first prompt is sent, the server is asked to tokenize its text: for another model its tokens are
        noise, and SGLang ends at an id beyond its vocabulary. A router that has no such route is not asked. The first
        answers are checked token by token for the prompt that was sent, the later ones by its length.

        Raises:
            EngineUnavailableError: no connection, no answer in time, or a status from 500.
            EngineRejectedError: another status than 200, which it carries with the body.
            EngineContractError: an answer without tokens or log-probs, or to another prompt.
            ConfigError: several models are served, and none was named; or the server tokenizes as another model does.
        """
        if self._model is None:
            self._model = await self._served_model()
        if not self._tokenizer_is_known:
            await self._check_tokenizer(request)
        body = self._body(request)
        if not self._prompt_is_read:
            body["return_prompt_token_ids"] = True
        headers = {"X-SMG-Routing-Key": request.routing_key} if request.routing_key else {}
        answer = await self._client.json("POST", f"{self._url}/v1/chat/completions", body, headers)
        completion = read_completion(answer, request, self._routed_experts)
        self._prompt_is_read = True
        return completion

    async def update_weights(self, path: str | os.PathLike[str], weight_version: str) -> None:
        """Have the server, or all workers at once, load a model folder that they can read under this path.

        An update that a server could not finish, since some request was just ending, is repeated for up to a minute.

        Args:
            path: Sent as an absolute one: a server may run in another folder, and takes what it does not find for the
                name of a model to download.
            weight_version: Told with every completion that is sampled from then on.

        Raises:
            EngineRejectedError: a folder without weights; the old ones stay where that happened. Of several workers the
                others have the new ones, and each completion names those that it was sampled with.
            EngineUnavailableError: as ``generate``. SGLang ends at weights that it cannot load, such as a file that is
                cut or of another shape.
            ConfigError: a version that is no text, or an empty one.
        """
        if not isinstance(weight_version, str) or not weight_version:
            raise ConfigError(
                "weight_version",
                got=shown(weight_version),
                expected="a text that is not empty",
                reason="rows tell by it which weights sampled them",
                remedy="number the updates, and name this one by the text of its number",
            )
        body = {
            "model_path": str(Path(os.fsdecode(path)).absolute()),
            "weight_version": weight_version,
            "flush_cache": True,
        }
        servers = self._workers or [self._url]
        failures = await asyncio.gather(*(self._update(server, body) for server in servers), return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    async def _update(self, server: str, body: dict[str, Any]) -> None:
        deadline = time.monotonic() + _FLUSH_S
        while True:
            try:
                answer = await self._client.json("POST", f"{server}/update_weights_from_disk", body)
            except EngineRejectedError as refusal:
                if _NOT_FLUSHED not in refusal.body or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_FLUSH_PAUSE_S)
                continue
            if not isinstance(answer, Mapping) or answer.get("success") is not True:
                raise EngineRejectedError.of_answer(400, json.dumps(answer))
            return

    async def _served_model(self) -> str:
        url = f"{self._url}/v1/models"
        try:
            answer = await self._client.json("GET", url)
        except EngineRejectedError as refusal:
            # Not the agent's request was refused, so it is not told the status.
            raise broken(f"HTTP status {refusal.status} of {url}", "the models that it serves", ADDRESS) from refusal
        listed = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(listed, list) or not all(isinstance(each, Mapping) and "id" in each for each in listed):
            raise broken(f"{shown(answer, 200)} of {url}", "the models that it serves, as a list in data", ADDRESS)
        # An adapter is listed too, and names the model that it belongs to.
        names = [str(entry["id"]) for entry in listed if entry.get("parent") is None]
        if not names:
            raise unavailable(url, "no model")
        if len(names) > 1:
            raise ConfigError(
                f"model of the engine at {self._url}",
                got=f"none named, and {', '.join(names)} there",
                expected="the name of one",
                reason="a router sends a request to the workers of the model that it names",
                remedy="name it: SGLangEngine(url, renderer, model=...)",
            )
        return names[0]

    async def _check_tokenizer(self, request: GenerationRequest) -> None:
        text = self.renderer.decode(request.token_ids.tolist())[:_TOKENIZED]
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._client.json("POST", f"{self._url}/tokenize", body)
        except (EngineRejectedError, EngineContractError):  # a router that has no such route
            answer = None
        tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
        if tokens is not None and tokens != self.renderer.encode(text):
            raise ConfigError(
                f"model of the engine at {self._url}",
                got=f"{shown(tokens)} as tokens of {shown(text)}",
                expected=f"{shown(self.renderer.encode(text))}, as the tokenizer here has them",
                reason="a model reads the ids of another one's tokenizer as some other text",
                remedy="name the folder of the model that is served there: --model, or HuggingFaceRenderer(folder)",
            )
        self._tokenizer_is_known = True

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
