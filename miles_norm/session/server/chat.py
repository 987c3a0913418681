"""The answers to chat completion requests in OpenAI's two shapes, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_norm.session.node import Node
from miles_norm.session.rendering import Renderer
from miles_norm.session.server.answers import to_json
from miles_norm.session.server.requests import ChatRequest

__all__ = ["chat_answer", "stream_events"]

PIECE, MOST_PIECES = 48, 64
"""Characters of content per event of a stream, and events of content at most."""


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
    if content:
        size = max(PIECE, -(-len(content) // MOST_PIECES))
        deltas += [{"content": content[at : at + size]} for at in range(0, len(content), size)]
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
    return f"data: {to_json(data)}\n\n".encode()
