"""A tiny model with its tokenizer, made here so that nothing is downloaded, and trainers of it."""

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", WANDB_DISABLED="true")
pytest.importorskip("trl", reason="needs trl: make test-trl")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

from miles_norm.integrations.trl import RolloutGRPOTrainer

WORDS = [f"w{n}" for n in range(28)]
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: n for n, word in enumerate([*SPECIAL.values(), *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **SPECIAL)


def model() -> LlamaForCausalLM:
    """About 25 thousand parameters, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=3,
    )
    return LlamaForCausalLM(config)


def arguments(folder: Path, **settings: Any) -> GRPOConfig:
    """Two prompts of four rows in one update of two micro-batches."""
    return GRPOConfig(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "max_steps": 1,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,  # off, so that gradients can be compared
            "beta": 0.0,
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        | settings
    )


def prompts(*texts: str) -> Dataset:
    return Dataset.from_dict({"prompt": list(texts)})


class Gradients(TrainerCallback):
    """The gradients just before the optimizer's step."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.of_steps.append({name: p.grad.clone() for name, p in given["model"].named_parameters()})


def trainer(folder: Path, reward: Any, *, settings: dict[str, Any] | None = None, **given: Any) -> RolloutGRPOTrainer:
    return RolloutGRPOTrainer(
        model(),
        reward_funcs=reward,
        args=arguments(folder, **settings or {}),
        train_dataset=given.pop("train_dataset", prompts("w0 w1", "w2 w3 w4")),
        processing_class=given.pop("processing_class", tokenizer()),
        **given,
    )


def log_prob_sums(model: LlamaForCausalLM, rows: list[tuple[list[int], list[int], list[int]]]) -> list[Tensor]:
    """For each row of prompt, completion and mask the sum of the log-probs of its trainable tokens."""
    sums = []
    for prompt, completion, mask in rows:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        sums.append((chosen * torch.tensor(mask)).sum())
    return sums
