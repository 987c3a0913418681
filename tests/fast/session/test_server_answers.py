"""Errors and replies as HTTP answers."""

import json
from typing import Any

import numpy as np
import pytest
from conversations import Chat, Session, user
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from miles_norm import errors
from miles_norm.errors import EngineRejectedError, MilesNormError
from miles_norm.session.node import Node
from miles_norm.session.server.answers import error_answer
from miles_norm.session.server.chat import MOST_PIECES, chat_answer, stream_events
from miles_norm.session.server.requests import ChatRequest

CHAT = Chat()
STATUS = {
    "UnauthorizedError": 401, "TooLargeError": 413, "UnknownSessionError": 404, "PathEndedError": 409,
    "NodeLimitError": 409, "SessionLimitError": 429, "RequestError": 400, "RenderingError": 400, "HookError": 422,
    "SessionError": 422, "EngineUnavailableError": 502, "EngineContractError": 502, "JournalError": 507,
    "DumpError": 500, "MissingDependencyError": 500,
}  # fmt: skip
RETRIED = {"SessionLimitError", "EngineUnavailableError"}


@pytest.mark.parametrize("name", STATUS)
def test_every_error_has_a_status_and_says_whether_to_repeat_the_request(name: str) -> None:
    kind: type[MilesNormError] = getattr(errors, name)
    answer = error_answer(kind("the subject", got="this", expected="that", reason="because", remedy="do"))
    assert answer.status_code == STATUS[name]
    assert answer.headers["x-should-retry"] == ("true" if name in RETRIED else "false")
    error = json.loads(answer.body)["error"]
    assert (error["code"], error["param"]) == (name, None)
    # On one line: clients put it into messages of their own.
    assert error["message"] == "the subject: this; expected that: because. To mend it: do"


@pytest.mark.parametrize(
    ("body", "passed_on"),
    [
        ('{"detail": [1]}', {"detail": [1]}),
        ("<html>", {"error": {"message": "<html>", "type": "engine_error"}}),
    ],
)
def test_what_an_engine_refused_is_passed_on(body: str, passed_on: Any) -> None:
    answer = error_answer(EngineRejectedError.of_answer(418, body))
    assert (answer.status_code, json.loads(answer.body)) == (418, passed_on)


def test_an_engine_that_refuses_without_a_word() -> None:
    answer = error_answer(EngineRejectedError.of_answer(400, ""))
    assert "HTTP status 400" in json.loads(answer.body)["error"]["message"]


def test_other_errors_tell_nothing_but_their_kind() -> None:
    answer = error_answer(KeyError("a secret"))
    assert answer.status_code == 500
    assert answer.headers["connection"] == "close"
    assert b"secret" not in answer.body
    assert json.loads(answer.body)["error"]["code"] == "KeyError"


def test_routes_keep_their_headers() -> None:
    answer = error_answer(HTTPException(405, headers={"Allow": "GET"}))
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


def node_of(message: dict[str, Any], **fields: Any) -> Node:
    return Session(CHAT).turn([user("hi")], "reply", message=message, **fields)


def events_of(node: Node, **fields: Any) -> list[Any]:
    """Of a stream, parsed; it ends as OpenAI's do."""
    request = ChatRequest(messages=[user("hi")], stream=True, **fields)
    *events, done, rest = b"".join(stream_events(node, request, CHAT)).decode("ascii").split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(events: list[Any]) -> dict[str, Any]:
    """The message, as clients make it of deltas."""
    message: dict[str, Any] = {}
    for event in events:
        for choice in event["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    calls = message.setdefault("tool_calls", [])
                    for call in value:
                        assert call["index"] == len(calls)
                        calls.append({key: part for key, part in call.items() if key != "index"})
                elif isinstance(message.get(name), str) and name == "content":
                    message[name] += value
                else:
                    message[name] = value
    return message


CALLS = st.lists(
    st.fixed_dictionaries({
        "id": st.text(), "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text(), "arguments": st.text()}),
    }),
    min_size=1, max_size=3,
)  # fmt: skip
# Lone surrogates too: an engine's JSON can hold them.
TEXT = st.text(st.characters(), max_size=300)
REPLY = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXT},
    optional={"tool_calls": CALLS, "reasoning_content": TEXT},
)


@given(REPLY)
def test_a_stream_puts_together_to_the_whole_reply(message: dict[str, Any]) -> None:
    node = node_of(message)
    events = events_of(node, logprobs=True, stream_options={"include_usage": True})
    whole = json.loads(json.dumps(chat_answer(node, ChatRequest(messages=[user("hi")], logprobs=True), CHAT)))
    assert put_together(events) == whole["choices"][0]["message"] == message
    (usage,) = [event for event in events if not event["choices"]]
    assert usage["usage"] == whole["usage"]
    assert [event["id"] for event in events] == [whole["id"]] * len(events)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    given_log_probs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert given_log_probs == [whole["choices"][0]["logprobs"]]


def test_a_long_reply_has_no_endless_stream() -> None:
    events = events_of(node_of({"role": "assistant", "content": "x" * 100_001}))
    assert MOST_PIECES <= len(events) <= MOST_PIECES + 3
    assert put_together(events)["content"] == "x" * 100_001


def test_log_probs_of_tokens_that_are_parts_of_letters() -> None:
    """Token by token: a part of a letter decodes to a replacement, in text and in bytes."""
    node = Session(CHAT).turn([user("hi")], "π")
    answer = chat_answer(node, ChatRequest(messages=[user("hi")], logprobs=True), CHAT)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["\ufffd", "\ufffd", "<|im_end|>"]
    assert np.float32([entry["logprob"] for entry in entries]).tolist() == node.completion.log_probs.tolist()
