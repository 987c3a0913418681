"""Write a tiny model with random weights, which SGLang and transformers load as any other.

    python -m sglang_cpu.tiny_model tiny --architecture qwen3

A token is a byte or one of five special tokens, so that every text can be tokenized, and most sampled token sequences
are no text. The chat template is ChatML with tools and tool calls as Qwen writes them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["ARCHITECTURES", "write_tiny_model"]

transformers.logging.disable_progress_bar()

ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
"""Name on the command line, and prefix of the classes in transformers."""

SPECIAL_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
}
"""Ids 256 and up, the bytes being below; False: kept when a reply is decoded, since its parser looks for it."""

END_OF_TEXT, END_OF_TURN = 256, 258
VOCABULARY = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- (call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_tiny_model(
    folder: str | os.PathLike[str],
    architecture: str = "qwen2",
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_length: int = 16_384,
) -> int:
    """Write model, tokenizer and chat template in float32; the number of parameters.

    Args:
        folder: Made if it is not there.
        architecture: One of ``ARCHITECTURES``.
        seed: Of the weights.
        hidden_size: A multiple of 16: there are four heads, whose size must be even.
        num_layers: Transformer blocks.
        max_length: Tokens of a context.

    Raises:
        ValueError: sizes that make no model, or a folder that is a file or holds another model.
    """
    if hidden_size < 16 or hidden_size % 16 or num_layers < 1:
        raise ValueError(
            f"hidden size {hidden_size}, {num_layers} layers: a multiple of 16, and at least 1, are possible"
        )
    _check_folder(Path(folder))
    tokenizer().save_pretrained(folder)
    prefix = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=END_OF_TURN,
        pad_token_id=END_OF_TEXT,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def _check_folder(folder: Path) -> None:
    """Tiny models are written over, and nothing else: a path that was mistaken would cost the weights of another."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    config = folder / "config.json"
    if config.exists() and json.loads(config.read_text(encoding="utf-8")).get("vocab_size") != VOCABULARY:
        raise ValueError(f"{folder} holds another model: name a folder without one")


def tokenizer() -> Any:
    """The tokenizer of all tiny models; ids as in the module's docstring."""
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in SPECIAL_TOKENS.items()]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in seen}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(seen)))
    return [letters[byte] for byte in range(256)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m sglang_cpu.tiny_model", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="qwen2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    options = parser.parse_args()
    try:
        parameters = write_tiny_model(
            options.folder,
            options.architecture,
            seed=options.seed,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {options.folder}: {options.architecture}, {parameters:,} parameters")


if __name__ == "__main__":
    main()
