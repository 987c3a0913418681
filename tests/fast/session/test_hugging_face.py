"""Tokenizer and chat template of a model folder: the same text and ids as transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from miles_norm.errors import ConfigError, RenderingError
from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.rendering import Renderer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "chat_templates.json").read_text(encoding="utf-8"))
CONFIG = {"bos_token": {"content": "<|endoftext|>", "lstrip": False}, "eos_token": "<|im_end|>", "pad_token": None}


def make_folder(folder: Path, config: dict[str, Any], template: str | None = None) -> Path:
    """Byte-level BPE with a few merges and special tokens."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("case", GOLDEN["rendered"], ids=lambda case: f"{case['template']}-{case['messages']}")
def test_text_and_ids_are_those_of_transformers(tmp_path: Path, case: dict[str, Any]) -> None:
    folder = make_folder(tmp_path, CONFIG, GOLDEN["templates"][case["template"]])
    renderer = HuggingFaceRenderer(folder, case["variables"])
    messages = copy.deepcopy(GOLDEN["messages"][case["messages"]])
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        # transformers was given an object, as it wants; OpenAI's API has its text.
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    sent = copy.deepcopy(messages)
    tools = GOLDEN["tools"] if case["tools"] else None
    if "error" in case:
        with pytest.raises(RenderingError, match=case["error"]):
            renderer.render(messages, tools, add_generation_prompt=case["add_generation_prompt"])
        return
    text = renderer.render(messages, tools, add_generation_prompt=case["add_generation_prompt"])
    assert text == case["text"]
    assert renderer.encode(text) == case["ids"]
    assert renderer.decode(case["ids"]) == text
    assert messages == sent


def test_it_is_a_renderer_and_reads_templates_from_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    renderer = HuggingFaceRenderer(make_folder(tmp_path, CONFIG | {"chat_template": named}))
    assert isinstance(renderer, Renderer)
    assert renderer.render([], add_generation_prompt=False) == "plain"
    assert renderer.render([], [{}, {}], add_generation_prompt=False) == "2 tools"


def test_the_file_goes_before_the_config(tmp_path: Path) -> None:
    renderer = HuggingFaceRenderer(make_folder(tmp_path, CONFIG | {"chat_template": "config"}, "file"))
    assert renderer.render([], [{}], add_generation_prompt=False) == "file"


def test_no_text_is_cut_or_padded(tmp_path: Path) -> None:
    """A tokenizer file may carry what its training asked for."""
    folder = make_folder(tmp_path, CONFIG, "")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(HuggingFaceRenderer(folder).encode("abcdefgh")) == 8


def test_null_content_and_arguments_that_are_no_object(tmp_path: Path) -> None:
    calls_of = "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    template = f"{{% for m in messages %}}[{{{{ m.content }}}}{calls_of}]{{% endfor %}}"
    renderer = HuggingFaceRenderer(make_folder(tmp_path, CONFIG, template))
    calls = [{"function": {"name": "f", "arguments": text}} for text in ("{broken", "[1]", '{"a": 1}')]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool"}]
    assert renderer.render(messages, add_generation_prompt=False) == "[{broken[1]{'a': 1}][]"


def test_a_template_may_not_reach_out(tmp_path: Path) -> None:
    renderer = HuggingFaceRenderer(
        make_folder(tmp_path, CONFIG, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    )
    with pytest.raises(RenderingError, match="SecurityError"):
        renderer.render([], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        ("tokenizer.json", r"got: +tokenizer\.json: .*No such file"),
        ("tokenizer_config.json", r"got: +tokenizer_config\.json or chat_template\.jinja: .*No such file"),
        ("chat_template.jinja", r"got: .*there is no chat template"),
    ],
)
def test_folders_that_lack_a_file(tmp_path: Path, missing: str, match: str) -> None:
    folder = make_folder(tmp_path, CONFIG, "{{ messages }}")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=match):
        HuggingFaceRenderer(folder)


BROKEN = [
    ("chat_template.jinja", "{% if %}"),
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", "[" * 100_000),
    ("tokenizer.json", "{}"),
]


@pytest.mark.parametrize(("file", "text"), BROKEN)
def test_folders_with_a_broken_file(tmp_path: Path, file: str, text: str) -> None:
    folder = make_folder(tmp_path, CONFIG, "{{ messages }}")
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=f"model folder .*\n +got: .*{file.split('.')[0]}"):
        HuggingFaceRenderer(folder)


NO_TEMPLATES = [5, {"default": "x"}, ["x"], [{"name": "default"}], [{"name": "default", "template": 5}]]


@pytest.mark.parametrize("found", NO_TEMPLATES)
def test_templates_of_another_form(tmp_path: Path, found: Any) -> None:
    folder = make_folder(tmp_path, CONFIG | {"chat_template": found})
    with pytest.raises(ConfigError, match=r"got: .*chat_template is .*, and neither a text nor texts with names"):
        HuggingFaceRenderer(folder)


RECURSION = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ '{}'.format() }}", "{{ range(10**9) }}", RECURSION])
def test_whatever_a_template_raises_is_about_the_messages(tmp_path: Path, template: str) -> None:
    renderer = HuggingFaceRenderer(make_folder(tmp_path, CONFIG, template))
    with pytest.raises(RenderingError, match=r"got: +\w+Error: "):
        renderer.render([], add_generation_prompt=False)


def test_a_named_token_without_a_text_is_no_variable(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CONFIG | {"bos_token": {"lstrip": False}}, "[{{ bos_token }}]")
    assert HuggingFaceRenderer(folder).render([], add_generation_prompt=False) == "[]"
