"""What a session needs from a model's chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from miles_norm.errors import RenderingError, shown

if TYPE_CHECKING:
    from miles_norm.session.token_ids import TokenIds

__all__ = ["Message", "Renderer", "check_renderer", "decoded", "rendered", "unfit_renderer"]

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


def check_renderer(renderer: Any) -> None:
    """Something with the methods of a ``Renderer``.

    Raises:
        RenderingError: one is lacking.
    """
    lacking = [name for name in ("render", "encode", "decode") if not callable(getattr(renderer, name, None))]
    if lacking:
        raise unfit_renderer(f"{shown(renderer)} without {', '.join(lacking)}")


def rendered(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, opened: bool
) -> str:
    """The conversation as text; ``opened``: with the opening of the next reply.

    Raises:
        RenderingError: the renderer returned no text.
    """
    return _text(renderer.render(messages, tools, add_generation_prompt=opened), "render")


def decoded(renderer: Renderer, token_ids: TokenIds) -> str:
    """Text of the ids.

    Raises:
        RenderingError: the renderer returned no text.
    """
    return _text(renderer.decode(token_ids.tolist()), "decode")


def unfit_renderer(got: str) -> RenderingError:
    """The error for a renderer that is none."""
    return RenderingError(
        "renderer",
        got=got,
        expected="render and decode that return text, and encode that returns token ids",
        reason="prompts are made of what it returns",
        remedy="pass an object with the three methods of miles_norm.session.Renderer",
    )


def _text(value: Any, method: str) -> str:
    if not isinstance(value, str):
        raise unfit_renderer(f"{shown(value)} from {method}")
    return value
