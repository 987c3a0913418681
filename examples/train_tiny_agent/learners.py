"""The policy on the trainer's side: log-probs of tokens with their gradient, and weights that an engine can load."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from miles_norm.session.engines.embedded_policy import EmbeddedPolicy, load_weights


class Learner(Protocol):
    """What the training loop asks of a policy."""

    model: nn.Module

    def log_probs(self, tokens: Tensor, trained: Tensor) -> Tensor:
        """Of the ``trained`` positions ``[N, T]`` of padded ``tokens`` ``[N, T]``, packed in row order."""

    def save(self, path: Path) -> Path:
        """Write the weights to a file or folder of about that name, which the engine can read; gives its path."""


class EmbeddedLearner:
    """The policy of the embedded engine."""

    def __init__(self, weights: Path) -> None:
        self.model = EmbeddedPolicy().with_weights(load_weights(weights))

    def log_probs(self, tokens: Tensor, trained: Tensor) -> Tensor:
        """One forward; what all rows begin with, such as the list of tools, is read once."""
        policy = self.model
        shared = int((tokens == tokens[:1]).all(dim=0).int().cumprod(dim=0).sum())
        shared = max(1, min(shared, tokens.shape[1] - 1))
        prefix, state = policy.gru(policy.embedding(tokens[:1, :shared]))
        rest, _ = policy.gru(policy.embedding(tokens[:, shared:-1]), state.expand(-1, len(tokens), -1).contiguous())
        states = torch.cat([prefix.expand(len(tokens), -1, -1), rest], dim=1)
        return _of_targets(policy.head(states[trained[:, 1:]]), tokens, trained)

    def save(self, path: Path) -> Path:
        """A safetensors file."""
        path = path.with_suffix(".safetensors")
        self.model.save(path)
        return path


class HuggingFaceLearner:
    """A causal language model in Hugging Face's format, which an SGLang server runs."""

    def __init__(self, folder: Path) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def log_probs(self, tokens: Tensor, trained: Tensor) -> Tensor:
        """One forward; attention is causal, so what is padded on the right changes nothing before it."""
        logits = self.model(input_ids=tokens[:, :-1]).logits
        return _of_targets(logits[trained[:, 1:]], tokens, trained)

    def save(self, path: Path) -> Path:
        """A folder with all that an engine reads, tokenizer and chat template too."""
        self.model.save_pretrained(path)
        self._tokenizer.save_pretrained(path)
        return path


def _of_targets(logits: Tensor, tokens: Tensor, trained: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).gather(-1, tokens[trained][:, None])[:, 0]
