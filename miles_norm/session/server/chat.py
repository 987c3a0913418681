"""OpenAI's chat completions: what a request may say, and the answers in both shapes, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miles_norm.errors import RequestError
from miles_norm.session.node import Node
from miles_norm.session.rendering import Renderer

__all__ = ["ChatMessage", "ChatRequest", "chat_answer", "stream_events"]

IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""Fields that only concern the bookkeeping of a provider."""

PIECE = 48
"""Characters of content per event of a stream."""


class ChatMessage(BaseModel):
    """What every message must have; fields beyond these are kept as they came."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A request for one reply.

    >>> ChatRequest.read(b'{"messages": [{"role": "user", "content": "hi"}], "n": 2}')
    Traceback (most recent call last):
    ...
    miles_norm.errors.RequestError: chat completion request
      got:      n: Input should be 1
      expected: an OpenAI chat completion request with one choice
      reason:   a turn of a session has one reply
      remedy:   send one request per reply; requests with the same messages become siblings
    """

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None

    @classmethod
    def read(cls, body: bytes) -> ChatRequest:
        """Parse the body of an HTTP request; the messages are kept as they came.

        Raises:
            RequestError: no JSON, a field missing or of another type, a role that does not exist; all are named.
        """
        try:
            request = cls.model_validate_json(body)
            problems = [
                f"messages[{number}].{_place(error)}: {error['msg']}"
                for number, message in enumerate(request.messages)
                for error in _message_errors(message)
            ]
        except ValidationError as error:
            problems = [f"{_place(each)}: {each['msg']}" if each["loc"] else each["msg"] for each in error.errors()]
            raise _bad_request(problems) from None
        if problems:
            raise _bad_request(problems)
        return request

    @property
    def limit(self) -> int | None:
        """Most tokens of the reply, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts at which the reply ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of."""
        return None if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def engine_fields(self) -> dict[str, Any]:
        """Fields that this server does not read, for the engine."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_choice not in (None, "auto", "none"):
            fields["tool_choice"] = self.tool_choice
        return {name: value for name, value in fields.items() if name not in IGNORED}


def chat_answer(node: Node, request: ChatRequest, renderer: Renderer) -> dict[str, Any]:
    """The answer as one JSON object."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": node.completion.message,
        "finish_reason": node.completion.finish_reason,
        "logprobs": _logprobs(node, renderer) if request.logprobs else None,
    }
    return {**_envelope(node, request, "chat.completion"), "choices": [choice], "usage": _usage(node)}


def stream_events(node: Node, request: ChatRequest, renderer: Renderer) -> Iterator[bytes]:
    """The answer as server-sent events.

    The reply is recorded before its first event is sent, so that what a client has seen is never lost.
    """
    envelope = _envelope(node, request, "chat.completion.chunk")
    message = node.completion.message
    content: str | None = message.get("content")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if content is not None else None}]
    deltas += [{"content": content[at : at + PIECE]} for at in range(0, len(content), PIECE)] if content else []
    calls = message.get("tool_calls") or ()
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(calls)]
    known = {"role", "content", "tool_calls"}
    rest = {name: value for name, value in message.items() if name not in known and value is not None}
    if rest:
        deltas.append(rest)
    logprobs = _logprobs(node, renderer) if request.logprobs else None
    for number, delta in enumerate(deltas):
        # All log-probs come with the first event: tokens and pieces of text do not end at the same places.
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs if number == 0 else None}
        yield _event({**envelope, "choices": [choice]})
    last = {"index": 0, "delta": {}, "finish_reason": node.completion.finish_reason, "logprobs": None}
    yield _event({**envelope, "choices": [last]})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield _event({**envelope, "choices": [], "usage": _usage(node)})
    yield b"data: [DONE]\n\n"


def _envelope(node: Node, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {
        "id": node.completion.response_id,
        "object": kind,
        "created": int(node.committed_at),
        "model": request.model or "policy",
    }


def _usage(node: Node) -> dict[str, int]:
    prompt, completion = node.prompt_length, len(node.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(node: Node, renderer: Renderer) -> dict[str, Any]:
    completion = node.completion
    entries = []
    for token, log_prob in zip(completion.token_ids.tolist(), completion.log_probs.tolist(), strict=True):
        text = renderer.decode([token])
        entries.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _message_errors(message: dict[str, Any]) -> list[Any]:
    try:
        ChatMessage.model_validate(message)
    except ValidationError as error:
        return list(error.errors())
    return []


def _place(error: Mapping[str, Any]) -> str:
    return ".".join(map(str, error["loc"]))


def _bad_request(problems: list[str]) -> RequestError:
    several = any(problem.startswith("n:") for problem in problems)
    return RequestError(
        "chat completion request",
        got="; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else ""),
        expected="an OpenAI chat completion request with one choice",
        reason="a turn of a session has one reply" if several else "it is rendered, sampled and recorded as it is",
        remedy="send one request per reply; requests with the same messages become siblings"
        if several
        else "mend the fields that are named",
    )
