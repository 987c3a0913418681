"""Tokenizer and chat template of a Hugging Face model folder, without transformers.

``tokenizer.json`` is read by the package tokenizers, and the template is rendered by Jinja2 in the environment that
transformers gives it. Both load in a tenth of a second, where transformers takes several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_norm.errors import ConfigError, RenderingError, shown
from miles_norm.session.extras import import_extra
from miles_norm.session.rendering import Message

if TYPE_CHECKING:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    import tokenizers
else:
    _SUBJECT = "tokenizer and chat template of a Hugging Face model"
    tokenizers, jinja2 = import_extra("tokenizers", _SUBJECT), import_extra("jinja2", _SUBJECT)
    import_extra("jinja2.sandbox", _SUBJECT)
    import_extra("jinja2.ext", _SUBJECT)

__all__ = ["HuggingFaceRenderer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HuggingFaceRenderer:
    """Renderer of the model in a folder.

    Of a message, null content becomes an empty text, and the arguments of a tool call become an object where they are
    the JSON text of one, as OpenAI's API has them: templates expect both. Nothing else is changed.

    Args:
        folder: Has ``tokenizer.json``, ``tokenizer_config.json``, and the template there or in ``chat_template.jinja``.
        template_variables: Further variables of the template, such as ``{"enable_thinking": False}``.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], template_variables: Mapping[str, Any] | None = None) -> None:
        self._folder = Path(folder)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json"))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:  # tokenizers raises nothing narrower
            raise self._unreadable("tokenizer.json", str(error)) from error
        try:
            config = json.loads((self._folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            self._templates = self._compile(config)
        except (OSError, ValueError, TypeError, RecursionError, jinja2.TemplateError) as error:
            raise self._unreadable("tokenizer_config.json or chat_template.jinja", str(error)) from error
        named = {name: config.get(name) for name in _NAMED_TOKENS}
        named = {name: token.get("content") if isinstance(token, Mapping) else token for name, token in named.items()}
        self._variables = {name: token for name, token in named.items() if token} | dict(template_variables or {})

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as the model reads it.

        Raises:
            RenderingError: the template refuses the messages, or fails on them.
        """
        template = self._templates.get("tool_use" if tools else "default") or self._templates["default"]
        try:
            return template.render(
                messages=[_plain(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is a program, and divides by zero as any other
            raise RenderingError(
                f"messages for the chat template of {self._folder}",
                got=f"{type(error).__name__}: {error}",
                expected="messages that the template renders",
                reason="templates refuse what their model was not trained on, such as two user messages in a row",
                remedy="change the messages, or the template",
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are recognized where the text spells them, and none is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens spelled out."""
        text: str = self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False)
        return text

    def _compile(self, config: object) -> dict[str, jinja2.Template]:
        """The template, or several by name: ``default`` and, if there is one, ``tool_use``."""
        if not isinstance(config, Mapping):
            raise TypeError(f"tokenizer_config.json is {shown(config)}, and no JSON object")
        file = self._folder / "chat_template.jinja"
        found = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        listed = [{"name": "default", "template": found}] if isinstance(found, str) else found or []
        if not isinstance(listed, list) or not all(_is_named_template(one) for one in listed):
            raise TypeError(f"chat_template is {shown(found)}, and neither a text nor texts with names")
        named = {one["name"]: one["template"] for one in listed}
        if "default" not in named:
            raise ValueError("there is no chat template")
        environment = _environment()
        return {name: environment.from_string(text) for name, text in named.items()}

    def _unreadable(self, file: str, got: str) -> ConfigError:
        return ConfigError(
            f"model folder {self._folder}",
            got=f"{file}: {got}",
            expected="tokenizer.json, and tokenizer_config.json or chat_template.jinja with a chat template",
            reason="prompts are rendered and tokenized here, as the model reads them",
            remedy="name the folder of the model; AutoTokenizer.from_pretrained(...).save_pretrained(...) writes these",
        )


def _is_named_template(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("name", "template"))


def _plain(message: Message) -> dict[str, Any]:
    plain = dict(message)
    if plain.get("content", "") is None:
        plain["content"] = ""
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return {**call, "function": function}


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks what the model writes and renders as what it holds."""

    tags = {"generation"}  # noqa: RUF012  # Declared so by Jinja2.

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja2's own filter escapes what HTML would misread.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    return environment
