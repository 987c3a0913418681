"""The embedded policy: a gated recurrent network over bytes, small enough for a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from miles_norm.errors import DumpError
from miles_norm.session.engines.chatml import END_OF_TURN, VOCABULARY_SIZE
from miles_norm.session.engines.protocol import refuse
from miles_norm.session.extras import import_extra
from miles_norm.storage.atomic import open_existing, replacing

__all__ = ["Decoder", "EmbeddedPolicy", "load_weights"]


class EmbeddedPolicy(nn.Module):
    r"""Next-token logits from one GRU layer.

    .. math::
        h_t = \mathrm{GRU}(E x_t, h_{t-1}), \qquad \mathrm{logits}_t = W h_t + b

    A recurrent state has one size, however long the context: a long prompt costs one step a token and no memory.
    Untrained, it writes printable characters and ends its turn after some 50 of them.

    Args:
        hidden_size: Of the state H.
        embedding_size: Of a token's embedding.
        seed: Of the initial weights; the global random state is left alone.

    >>> policy = EmbeddedPolicy()
    >>> policy(torch.tensor([[104, 105, 258]])).shape, sum(p.numel() for p in policy.parameters())
    (torch.Size([1, 3, 261]), 124869)
    """

    def __init__(self, hidden_size: int = 128, embedding_size: int = 64, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY_SIZE, embedding_size)
            self.gru = nn.GRU(embedding_size, hidden_size, batch_first=True)
            self.head = nn.Linear(hidden_size, VOCABULARY_SIZE)
        with torch.no_grad():
            self.head.bias.fill_(-8.0)
            self.head.bias[32:127] = 0.0
            self.head.bias[END_OF_TURN] = 0.6  # about 1 in 52 beside 95 characters

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of the token after each of ``token_ids`` ``[B, T]``."""
        states, _ = self.gru(self.embedding(token_ids))
        logits: Tensor = self.head(states)
        return logits

    def with_weights(self, weights: Mapping[str, Tensor]) -> EmbeddedPolicy:
        """A policy of the same sizes that has the given weights, as ``state_dict`` names them.

        Raises:
            EngineRejectedError: missing, unknown, wrongly shaped or non-finite weights; all are named.
        """
        own = self.state_dict()
        faults = [f"{name} is missing" for name in own if name not in weights]
        for name, value in weights.items():
            if name not in own:
                faults.append(f"{name} is unknown")
            elif value.shape != own[name].shape:
                faults.append(f"{name} has shape {list(value.shape)} instead of {list(own[name].shape)}")
            elif not value.is_floating_point():
                faults.append(f"{name} has dtype {str(value.dtype).removeprefix('torch.')}")
            elif not bool(torch.isfinite(value.float()).all()):
                faults.append(f"{name} has values that are no finite numbers")
        if faults:
            got = "; ".join(faults[:10]) + (f"; and {len(faults) - 10} more" if len(faults) > 10 else "")
            raise refuse(got, "the weights of this policy, finite, under the names of its state_dict")
        policy = EmbeddedPolicy(self.gru.hidden_size, self.gru.input_size)
        policy.load_state_dict(dict(weights))
        return policy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as a safetensors file, which appears whole or not at all.

        Raises:
            DumpError: the folder is missing, full or not writable.
            MissingDependencyError: the package safetensors is not installed.
        """
        subject = f"weights {os.fspath(path)}"
        package = import_extra("safetensors.torch", subject)
        with replacing(Path(path), subject) as file:
            file.write(package.save(self.state_dict()))


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights of a safetensors file, or of ``model.safetensors`` in a folder.

    Raises:
        DumpError: there is no such file, or it is no safetensors file.
        MissingDependencyError: the package safetensors is not installed.
    """
    file = Path(path)
    file = file / "model.safetensors" if file.is_dir() else file
    subject = f"weights {os.fspath(file)}"
    package = import_extra("safetensors.torch", subject)
    with open_existing(file, subject, reason="the weights of the policy are read from it") as stream:
        data = stream.read()
    try:
        weights: dict[str, Tensor] = package.load(data)
    except (import_extra("safetensors", subject).SafetensorError, ValueError, KeyError) as error:
        raise DumpError(
            subject,
            got=str(error),
            expected="a safetensors file",
            reason="the weights of the policy are read from it",
            remedy="write it with EmbeddedPolicy.save",
        ) from error
    return weights


class Decoder:
    """The policy one token at a time, on copies of its weights: later training of the policy does not show here."""

    def __init__(self, policy: EmbeddedPolicy) -> None:
        self.hidden_size = policy.gru.hidden_size
        weights = policy.state_dict()
        # The input's share of the gates depends on the token alone.
        self._inputs = nn.functional.linear(
            weights["embedding.weight"], weights["gru.weight_ih_l0"], weights["gru.bias_ih_l0"]
        )
        self._recurrent = weights["gru.weight_hh_l0"].t().contiguous()
        self._head = weights["head.weight"].t().contiguous()
        self._bias, self._head_bias = weights["gru.bias_hh_l0"].clone(), weights["head.bias"].clone()

    def step(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, V]`` after ``tokens`` ``[B]`` and the new states ``[B, H]``."""
        size = self.hidden_size
        inputs = self._inputs.index_select(0, tokens)
        recurrent = torch.addmm(self._bias, states, self._recurrent)
        # PyTorch's order: reset gate, update gate, candidate.
        gates = torch.sigmoid(inputs[:, : 2 * size] + recurrent[:, : 2 * size])
        candidate = torch.tanh(inputs[:, 2 * size :] + gates[:, :size] * recurrent[:, 2 * size :])
        states = torch.lerp(candidate, states, gates[:, size:])
        return torch.addmm(self._head_bias, states, self._head), states
