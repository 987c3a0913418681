"""Bytes as tokens and ChatML as the chat template: the renderer of the embedded policy."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from miles_norm.errors import RenderingError, shown
from miles_norm.session.rendering import Message

__all__ = [
    "END_OF_CALL",
    "END_OF_TEXT",
    "END_OF_TURN",
    "SPECIAL_TOKENS",
    "START_OF_CALL",
    "VOCABULARY_SIZE",
    "ChatMLRenderer",
    "text_of",
]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
"""Ids 256 and up; the ids below are bytes."""
END_OF_TEXT, END_OF_TURN, START_OF_CALL, END_OF_CALL = 256, 258, 259, 260
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)

_IDS = {text: 256 + number for number, text in enumerate(SPECIAL_TOKENS)}
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
_CALL = re.compile("<tool_call>(.*?)</tool_call>", re.DOTALL)


class ChatMLRenderer:
    r"""Renders messages between ``<|im_start|>`` and ``<|im_end|>``, one token per byte and per special token.

    Tools are listed as JSON at the end of the system message. A tool call is ``{"name": ..., "arguments": {...}}``
    between ``<tool_call>`` and ``</tool_call>``.

    >>> renderer = ChatMLRenderer()
    >>> text = renderer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    >>> text
    '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    >>> renderer.encode("hi<|im_end|>"), renderer.decode([104, 105, 258])
    ([104, 105, 258], 'hi<|im_end|>')
    """

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as the policy reads it.

        Raises:
            RenderingError: a message without a role, with parts that are no text, or with a malformed tool call.
        """
        turns = [(_role(message), _body(message)) for message in messages]
        if tools:
            listed = "# Tools\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            if turns and turns[0][0] == "system":
                turns[0] = ("system", f"{turns[0][1]}\n\n{listed}")
            else:
                turns.insert(0, ("system", listed))
        text = "".join(f"<|im_start|>{role}\n{body}<|im_end|>\n" for role, body in turns)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; special tokens are recognized where the text spells them."""
        ids: list[int] = []
        for number, part in enumerate(_SPECIAL.split(text)):
            # What the pattern captured stands at the odd places.
            if number % 2:
                ids.append(_IDS[part])
            else:
                # A lone surrogate, which JSON can carry, has no UTF-8; it is written as a question mark.
                ids.extend(part.encode("utf-8", "replace"))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        encoded = bytearray()
        for token in token_ids:
            if token < 256:
                encoded.append(token)
            else:
                encoded += SPECIAL_TOKENS[token - 256].encode()
        return encoded.decode("utf-8", "replace")

    def parse_reply(self, text: str, *, tools: bool) -> dict[str, Any]:
        """A sampled reply as an OpenAI assistant message.

        Args:
            text: Of the reply, without the token that ended it.
            tools: Look for tool calls. Where one of them is not JSON of the right form, all of the text is content.
        """
        found = [_parse_call(body) for body in _CALL.findall(text)] if tools else []
        calls = [call for call in found if call is not None]
        if not calls or len(calls) < len(found):
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": _CALL.sub("", text), "tool_calls": calls}


def text_of(content: object) -> str:
    """Text of a message's content: a text, None, or a list of text parts.

    Raises:
        RenderingError: anything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise _malformed("content of a message", shown(content), "a text, a list of text parts, or null")


def _role(message: Message) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise _malformed("role of a message", shown(role), "a text such as 'user'")
    return role


def _body(message: Message) -> str:
    calls, given = [], message.get("tool_calls") or ()
    if not isinstance(given, Sequence):
        raise _malformed("tool_calls of a message", shown(given), "a list of tool calls")
    for call in given:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _malformed("tool call of a message", shown(call), "{'function': {'name': ..., 'arguments': ...}}")
        arguments = function.get("arguments") or "{}"
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        calls.append(f'<tool_call>{{"name": {name}, "arguments": {written}}}</tool_call>')
    return text_of(message.get("content")) + "".join(calls)


def _parse_call(body: str) -> dict[str, Any] | None:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call["arguments"]
        # json.loads takes NaN and Infinity, which are no JSON.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


def _malformed(subject: str, got: str, expected: str) -> RenderingError:
    return RenderingError(
        subject,
        got=got,
        expected=expected,
        reason="the chat template writes it into the prompt",
        remedy="send messages of OpenAI's form",
    )
