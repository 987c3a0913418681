"""What bodies of requests become."""

import json

import pytest

from miles_norm.errors import RequestError
from miles_norm.session.server.requests import ChatRequest, NewSession, SamplesRequest, read_body

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return read_body(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def test_an_empty_body_is_that_of_all_defaults() -> None:
    assert read_body(NewSession, b"").metadata == {}
    assert read_body(SamplesRequest, b"").picker == "drop_retries"


def test_messages_are_kept_as_they_came() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1,  "a": 2.0}'}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}], "name": "x"},
        {
            "tool_calls": [call],
            "content": None,
            "role": "assistant",
            "reasoning_content": "why",
            "extra": [1, 2.5, None],
        },
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "developer", "content": "b"},
    ]
    read = chat(messages=messages).messages
    assert read == messages
    assert [list(message) for message in read] == [list(message) for message in messages]


def test_either_name_of_the_limit() -> None:
    assert chat().limit is None
    assert chat(max_tokens=5).limit == 5
    assert chat(max_tokens=5, max_completion_tokens=7).limit == 7


def test_stop_texts() -> None:
    assert [chat(stop=stop).stop_texts for stop in (None, "a", ["a", "b"], [])] == [(), ("a",), ("a", "b"), ()]


def test_tools_that_are_offered() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools).offered_tools == tools
    assert chat(tools=tools, tool_choice="auto").engine_fields == {}
    assert chat(tools=tools, tool_choice="none").offered_tools is None
    assert chat(tools=[]).offered_tools is None
    forced = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=tools, tool_choice=forced).engine_fields == {"tool_choice": forced}


def test_what_is_left_to_the_engine() -> None:
    request = chat(top_k=5, user="me", store=True, response_format={"type": "text"}, logit_bias=None, seed=3, n=1)
    assert request.engine_fields == {"top_k": 5, "response_format": {"type": "text"}}


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "stream", "seed", "stop", "tools", "stream_options"])
def test_null_is_as_good_as_nothing(name: str) -> None:
    assert getattr(chat(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "0.5"), ("max_tokens", 5.0), ("max_tokens", "5"), ("stream", 1), ("seed", True), ("n", 0)],
)
def test_values_of_another_type_are_not_guessed_at(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"got:      {name}: "):
        chat(**{name: value})


def test_whole_numbers_are_numbers() -> None:
    assert chat(temperature=0).temperature == 0.0


def test_rewards_keep_their_types() -> None:
    rewards = {"a": 1, "b": True, "c": 0.5, "d": {"accuracy": 1.0}, "e": None}
    asked = read_body(SamplesRequest, json.dumps({"agent": {"rewards": rewards, "note": "x"}}).encode()).agent
    assert asked is not None
    kept = asked.model_dump(exclude_unset=True)
    assert kept == {"rewards": rewards, "note": "x"}
    assert [type(value) for value in kept["rewards"].values()] == [int, bool, float, dict, type(None)]


def test_ids_keep_their_types() -> None:
    asked = read_body(SamplesRequest, b'{"group_index": "a", "index": 0, "rollout_id": "0"}')
    assert (asked.group_index, asked.index, asked.rollout_id) == ("a", 0, "0")


@pytest.mark.parametrize("calls", [3, "x", [3], {"id": "0"}])
def test_tool_calls_are_a_list_of_objects(calls: object) -> None:
    body = json.dumps({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}).encode()
    with pytest.raises(RequestError, match="tool_calls are"):
        read_body(ChatRequest, body)
