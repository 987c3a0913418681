"""What a session asks of an inference engine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from miles_norm.errors import EngineRejectedError, EngineUnavailableError, shown
from miles_norm.session.completion import Completion
from miles_norm.session.rendering import Message, Renderer

__all__ = ["Engine", "GenerationRequest", "refuse", "wait_until_ready"]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample.

    Raises:
        EngineRejectedError: no prompt, no messages, or a sampling parameter out of range; all are named, status 400.
    """

    token_ids: NDArray[np.int32]
    """The prompt as the model reads it ``[T]``, opening of the reply included; never rendered again."""
    messages: Sequence[Message]
    """The same prompt as OpenAI messages, at least one, for engines and routers that want to see them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """OpenAI tools; replies are parsed for tool calls where there are any."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_tokens: int | None = None
    """Limit of the reply; None: what is left of the context."""
    stop: tuple[str, ...] = ()
    """Texts at which the reply ends; they are sampled and counted, but not part of the message."""
    seed: int | None = None
    """The same request with the same seed gives the same tokens; None draws one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the client's request, such as ``top_k``; an engine that does not know one refuses it."""
    routing_key: str | None = None
    """Requests with the same key share a prefix: a router sends them to the same engine."""

    def __post_init__(self) -> None:
        limit = self.max_tokens
        faults = {
            "token_ids": None if len(self.token_ids) else "empty, expected at least 1 token",
            "messages": None if self.messages else "empty, expected at least 1 message",
            "temperature": _outside(self.temperature, 0.0, math.inf),
            "top_p": "0, expected more" if self.top_p == 0 else _outside(self.top_p, 0.0, 1.0),
            "max_tokens": None if limit is None else _outside(limit, 1, math.inf),
            "stop": "an empty text" if "" in self.stop else None,
        }
        found = [f"{name}: {text}" for name, text in faults.items() if text]
        if found:
            named = [name for name, text in faults.items() if text]
            param = named[0] if len(named) == 1 else None
            raise refuse("; ".join(found), "sampling parameters within their ranges", param)


def _outside(value: float, low: float, high: float) -> str | None:
    at_most = "" if high == math.inf else f" and at most {high:g}"
    inside = low <= value <= high and math.isfinite(value)
    return None if inside else f"{shown(value)}, expected at least {low:g}{at_most}"


def refuse(got: str, expected: str, param: str | None = None) -> EngineRejectedError:
    """The error for a request that cannot be served as it is: HTTP status 400 and a body as OpenAI's.

    Args:
        got: What cannot be served.
        expected: What could be.
        param: Field of the request that is at fault, if it is one.
    """
    error = EngineRejectedError(
        "request to the engine",
        got=got,
        expected=expected,
        reason="sampling something else than what was asked for would go unnoticed into the training data",
        remedy="mend the request",
    )
    message = f"{got} (expected {expected})"
    about = {"type": "invalid_request_error", "param": param, "code": type(error).__name__}
    error.body = json.dumps({"error": {"message": message, **about}})
    return error


@runtime_checkable
class Engine(Protocol):
    """Samples completions; every method may be called by many tasks at once.

    A task that is cancelled while it waits for ``generate`` ends its own generation and nobody else's.
    """

    @property
    def renderer(self) -> Renderer:
        """Chat template and tokenizer of the model that it runs."""

    async def start(self) -> None:
        """Get ready: called once, before any other method, on the loop that uses the engine."""

    async def close(self) -> None:
        """Let go of everything; generations that still run raise ``EngineUnavailableError``."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineUnavailableError: the engine is down, failed, or took too long.
            EngineRejectedError: it refused the request, with a status and a body to pass on.
            EngineContractError: its answer lacks tokens or log-probs, or is about another prompt.
        """

    async def health(self) -> bool:
        """Whether it would serve a request now."""

    async def update_weights(self, path: str | PathLike[str], weight_version: str) -> None:
        """Load new weights from disk; completions sampled from then on carry the version.

        Generations that run finish under the old weights first.

        Raises:
            EngineUnavailableError, EngineRejectedError: as ``generate``; the old weights stay.
        """


async def wait_until_ready(engine: Engine, timeout_s: float, *, interval_s: float = 0.5) -> None:
    """Wait for an engine that is starting, or starting again.

    Raises:
        EngineUnavailableError: it was not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while not await engine.health():
        if time.monotonic() > deadline:
            raise EngineUnavailableError(
                "engine",
                got=f"not ready after {timeout_s:g} s",
                expected="an engine that serves requests",
                reason="rollouts would fail at their first turn",
                remedy="see whether it runs, what its log says, and whether the address is right; or wait longer",
            )
        await asyncio.sleep(interval_s)
