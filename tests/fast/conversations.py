"""Chat templates and tokenizers as real ones behave, and conversations with a scripted engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_norm.session.completion import Completion
from miles_norm.session.node import Node
from miles_norm.session.prompt import next_prompt
from miles_norm.session.tree import TrajectoryForest

SPECIAL = {256: "<|endoftext|>", 257: "<|im_start|>", 258: "<|im_end|>"}
STOP = 258
BLOCK = "</think>"


def byte_ids() -> dict[int, int]:
    """Byte -> id, as a byte-level BPE without merges has them: sorted by the letters that stand for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {byte: number for number, byte in enumerate(sorted(letters, key=lambda byte: letters[byte]))}


class Chat:
    """The ChatML template and byte-level tokenizer of the recorded conversations.

    ``merges`` are further tokens: texts that ``encode`` makes one token of, though a model may sample them letter by
    letter.
    """

    def __init__(self, merges: Sequence[str] = ()) -> None:
        ids = byte_ids()
        self._bytes = {number: bytes([byte]) for byte, number in ids.items()}
        self._bytes |= {number: text.encode() for number, text in SPECIAL.items()}
        self._bytes |= {300 + number: text.encode() for number, text in enumerate(merges)}
        self._ids = {data: number for number, data in self._bytes.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)), re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return [self._ids[piece] for piece in self._pattern.findall(text.encode())]

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes[number] for number in token_ids).decode(errors="replace")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        texts = [f"<|im_start|>tools\n{list(tools)}<|im_end|>\n"] if tools else []
        asked = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for number, message in enumerate(messages):
            texts.append(f"<|im_start|>{message['role']}\n{self.body(message, number > asked)}<|im_end|>\n")
        return "".join(texts) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def body(self, message: Mapping[str, Any], latest: bool) -> str:
        """The text of one message; ``latest`` where no question follows it."""
        calls = "".join(f"\n<call>{call['function']}</call>" for call in message.get("tool_calls") or ())
        return (message.get("content") or "") + calls


class StripsThinking(Chat):
    """A template that leaves out the reasoning of a reply once a question follows it, as that of Qwen3."""

    def body(self, message: Mapping[str, Any], latest: bool) -> str:
        text = super().body(message, latest)
        return text if latest or message["role"] != "assistant" else text.rpartition(BLOCK)[2]


class Trims(Chat):
    """A template that strips the content of messages."""

    def body(self, message: Mapping[str, Any], latest: bool) -> str:
        return super().body(message, latest).strip()


def nested(depth: int = 5000) -> list[Any]:
    """A list in a list, deeper than the interpreter's stack."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def reply(chat: Chat, text: str, *, stop: bool = True, seq: int = 0, **fields: Any) -> Completion:
    """What an engine returns for a text that was sampled letter by letter.

    Log-probs are -1 - seq - j/1024 for its token j, so that they tell which completion a token of a row comes from.
    """
    ids = Chat().encode(text) + [STOP] * stop
    values = {
        "message": assistant(text),
        "token_ids": np.array(ids, np.int32),
        "log_probs": np.array([-1 - seq - j / 1024 for j in range(len(ids))], np.float32),
        "finish_reason": "stop",
        "response_id": f"r{seq}",
    }
    return Completion(**values | fields)


class Session:
    """A forest with its chat template; turns are taken as a server takes them."""

    def __init__(self, chat: Chat | None = None, **settings: Any) -> None:
        self.chat = chat or Chat()
        self.forest = TrajectoryForest(**settings)

    def turn(self, messages: Sequence[Mapping[str, Any]], text: str, **fields: Any) -> Node:
        """Send a request and commit what the engine "sampled"."""
        attachment = self.forest.attach(messages, fields.pop("tools", None))
        prompt = next_prompt(self.forest, attachment, self.chat)
        completion = reply(self.chat, text, seq=len(self.forest.nodes), **fields)
        node = self.forest.commit(attachment, prompt.token_ids, completion, committed_at=0.0)
        assert node.starts_row != prompt.extends
        assert np.array_equal(self.forest.prompt_token_ids(node.seq), prompt.token_ids)
        return node

    def then(self, node: Node, question: str) -> list[Mapping[str, Any]]:
        """The request that asks another question after a turn."""
        return [*self.forest.messages(node.seq), user(question)]
