"""The renderer of the embedded policy: ChatML over bytes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.errors import RenderingError
from miles_norm.session.engines.chatml import SPECIAL_TOKENS, VOCABULARY_SIZE, ChatMLRenderer
from miles_norm.session.rendering import Renderer

RENDERER = ChatMLRenderer()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_it_is_a_renderer() -> None:
    assert isinstance(RENDERER, Renderer)


def test_a_conversation_with_tools() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "4?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 3}'), call("add", {"b": "é"})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    assert RENDERER.render(messages, [TOOL], add_generation_prompt=True) == (
        '<|im_start|>system\nBe brief.\n\n# Tools\n{"type": "function", "function": {"name": "add", "parameters": '
        '{"type": "object"}}}<|im_end|>\n'
        "<|im_start|>user\n3+4?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"b": "é"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n7<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_without_a_system_message() -> None:
    text = RENDERER.render([{"role": "user", "content": "hi"}], [TOOL], add_generation_prompt=False)
    assert text.startswith('<|im_start|>system\n# Tools\n{"type"')
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")


def test_ids() -> None:
    # é is 195 169 in UTF-8.
    assert RENDERER.encode("é<|im_end|><tool_call>") == [195, 169, 258, 259]
    assert RENDERER.decode([195, 169, 258, 195]) == "é<|im_end|>�"
    assert RENDERER.encode("\ud800") == [63]
    assert [RENDERER.encode(text) for text in SPECIAL_TOKENS] == [[token] for token in range(256, VOCABULARY_SIZE)]


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPECIAL_TOKENS)), max_size=8).map("".join))
def test_encoding_loses_nothing(text: str) -> None:
    ids = RENDERER.encode(text)
    assert RENDERER.decode(ids) == text
    assert all(0 <= token < VOCABULARY_SIZE for token in ids)


JSON_VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), st.lists)
JSON_OBJECTS = st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)


@given(name=st.text(max_size=6), arguments=JSON_OBJECTS, content=st.text(alphabet="ab <", max_size=5))
def test_a_rendered_call_is_parsed_back(name: str, arguments: dict[str, Any], content: str) -> None:
    message = {"role": "assistant", "content": content, "tool_calls": [call(name, json.dumps(arguments))]}
    text = RENDERER.render([message], add_generation_prompt=False)
    body = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    parsed = RENDERER.parse_reply(body, tools=True)
    assert parsed["content"] == content
    [found] = parsed["tool_calls"]
    assert found["function"]["name"] == name
    assert json.loads(found["function"]["arguments"]) == arguments
    assert found["id"].startswith("call_")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "7",
        "{",
        '{"name": "f"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"a{good}<tool_call>{body}</tool_call>"
    assert RENDERER.parse_reply(text, tools=True) == {"role": "assistant", "content": text}
    assert RENDERER.parse_reply(good, tools=False) == {"role": "assistant", "content": good}


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"content": "x"}, r"role of a message\n +got: +None"),
        ("x", r"role of a message\n +got: +None"),
        ({"role": "user", "content": 7}, r"content of a message\n +got: +7\n"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            r"content of a message\n +got: .*image_url",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, r"tool call of a message\n +got: +\{'id': 'x'\}"),
        ({"role": "assistant", "tool_calls": [call(None, "{}")]}, "tool call of a message"),  # type: ignore[arg-type]
    ],
)
def test_malformed_messages(message: Any, match: str) -> None:
    with pytest.raises(RenderingError, match=match):
        RENDERER.render([message], add_generation_prompt=True)
