"""What a session needs from a model's chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["Message", "Renderer"]

Message = Mapping[str, Any]
"""One OpenAI chat message."""


@runtime_checkable
class Renderer(Protocol):
    """Messages to text, text to tokens, tokens to text."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as the model reads it, with the opening of the next reply if asked for."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are recognized where the text spells them, and none is added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens spelled out."""
