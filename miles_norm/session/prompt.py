"""The prompt of the next turn: the tokens of the turn before as they were sampled, and then the text that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_norm.errors import SessionError
from miles_norm.session.node import Attachment, Node
from miles_norm.session.rendering import Message, Renderer, check_renderer, decoded, rendered, unfit_renderer
from miles_norm.session.token_ids import TokenIds, as_token_ids
from miles_norm.session.tree import TrajectoryForest, check_forest
from miles_norm.session.turn_checks import check_attachment

__all__ = ["PromptTokens", "next_prompt"]

_PROBE = "x7Qz-end-of-reply-zQ7x"


@dataclass(frozen=True, eq=False, slots=True)
class PromptTokens:
    """What to send to the engine for a request."""

    token_ids: TokenIds
    """The whole prompt, ``[prompt_length]``."""
    extends: bool
    """Whether it begins with the tokens of the turn that it continues. False also for the first turn of a tree."""


def next_prompt(forest: TrajectoryForest, attachment: Attachment, renderer: Renderer) -> PromptTokens:
    """The prompt for a request that was attached to a forest.

    Sampled tokens are never tokenized again. Behind them comes the text that the template puts between the end of the
    reply and the opening of the next one, closing of the turn and line breaks included; what the model wrote of it
    itself, such as the token that ended the turn, is not repeated.

    A template does not extend when it renders the conversation so far differently once messages follow, as one that
    removes earlier reasoning does; neither does a conversation whose tools have changed. The prompt is then rendered
    afresh, and the turn starts a row.

    Args:
        forest: Where the request was attached.
        attachment: Of ``forest.attach``.
        renderer: Chat template and tokenizer of the model.

    Raises:
        SessionError: no forest, or an attachment to no turn of it.
        RenderingError: a renderer that lacks a method, or returns no text or no token ids.
    """
    check_forest(forest)
    check_attachment(attachment)
    check_renderer(renderer)
    if attachment.parent is None:
        text = rendered(renderer, attachment.suffix, attachment.tools, opened=True)
        return PromptTokens(_encoded(renderer, text), extends=False)
    parent, held = forest.node(attachment.parent), forest.messages(attachment.parent)
    text = rendered(renderer, [*held, *attachment.suffix], attachment.tools, opened=True)
    between = _between(parent, held, text, renderer)
    if between is None:
        return PromptTokens(_encoded(renderer, text), extends=False)
    return PromptTokens(np.concatenate([forest.token_ids(parent.seq), between]), extends=True)


def _between(node: Node, held: Sequence[Message], text: str, renderer: Renderer) -> TokenIds | None:
    """Tokens from the end of what was sampled to the end of ``text``; None where the template does not extend.

    Args:
        node: The turn that is continued.
        held: The conversation up to its reply.
        text: The rendered request.
        renderer: Chat template and tokenizer.
    """
    asked = held[:-1]
    opening = rendered(renderer, asked, node.tools, opened=True)
    closed = rendered(renderer, held, node.tools, opened=False)
    if not (closed.startswith(opening) and text.startswith(closed)):
        return None
    sampled = decoded(renderer, node.completion.token_ids)
    if text.startswith(sampled, len(opening)):
        return _encoded(renderer, text[len(opening) + len(sampled) :])
    # The message is not what was sampled, letter by letter: tool calls are parsed and written again, space is trimmed.
    closing = _closing(asked, node, renderer)
    if closing is None or not closed.endswith(closing):
        return None
    ids = _encoded(renderer, text[len(closed) - len(closing) :])
    written = _overlap(node.completion.token_ids, ids[: len(_encoded(renderer, closing))])
    return ids[written:]


def _closing(asked: Sequence[Message], node: Node, renderer: Renderer) -> str | None:
    """What the template writes behind the text of a reply; None where it hides the reply or repeats it."""
    reply = {"role": "assistant", "content": _PROBE}
    text = rendered(renderer, [*asked, reply], node.tools, opened=False)
    return text.partition(_PROBE)[2] if text.count(_PROBE) == 1 else None


def _overlap(sampled: TokenIds, closing: TokenIds) -> int:
    """How many of the first closing tokens are the last sampled ones."""
    for length in range(min(len(sampled), len(closing)), 0, -1):
        if np.array_equal(sampled[-length:], closing[:length]):
            return length
    return 0


def _encoded(renderer: Renderer, text: str) -> TokenIds:
    try:
        return as_token_ids(renderer.encode(text), "rendered prompt")
    except SessionError as error:
        raise unfit_renderer(f"{error.got} from encode") from error
