"""One ragged batch with one config through every integration: the table of ``docs/integrations/parity.md``.

    python docs/integrations/parity.py

An integration is a function that takes the batch the way its framework does and gives back what that framework would
train on: the advantage of each row, the loss, and its gradient for each log-prob. One whose framework is not
installed is shown as such.
"""

import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from miles_norm import loss_weights, normalize_rewards
from miles_norm.integrations import agent_lightning, miles, slime
from miles_norm.loss import clipped_loss, reduce_token_losses, scale_advantages

CLIP = (0.2, 0.2)
FLAGS = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True, reward_key=None)

# Prompt, rollout, its reward, and the loss mask of each of its rows. The rewards are exact in float32 and bfloat16, in
# which some frameworks carry them.
ROLLOUTS = (
    (0, 0, 1.0, [[1, 1, 0, 1]]),
    (0, 1, 0.0, [[1, 1], [0, 1, 1, 1, 1], [1]]),
    (0, 2, 0.25, [[1, 0, 0, 1], [1, 1, 1]]),
    (1, 3, 0.75, [[1, 1, 1, 1, 1, 1], [1, 1]]),
    (1, 4, 0.125, [[1, 0, 1]]),
    (1, 5, 0.5, [[1, 1, 1, 1]]),
)


@dataclass(frozen=True)
class Batch:
    """N rows of up to T response tokens."""

    rows: list[dict[str, Any]]
    """The rows with Miles' field names."""
    mask: Tensor
    """int64 ``[N, T]``."""
    old: Tensor
    """float64 ``[N, T]``: log-probs of the policy that sampled."""
    new: Tensor
    """float64 ``[N, T]``: log-probs of the policy that is trained."""


@dataclass(frozen=True)
class Outcome:
    """What one integration trains on."""

    advantages: Tensor
    """float32 ``[N]``."""
    loss: Tensor
    """A scalar."""
    gradient: Tensor
    """``[N, T]``: the gradient of the loss for each of ``Batch.new``."""


@dataclass(frozen=True)
class Integration:
    """A row of the table."""

    name: str
    run: Callable[[Batch], Outcome]
    package: str | None = None
    """What has to be installed."""


def ragged_batch() -> Batch:
    """Two prompts, six rollouts, ten rows; ratios reach beyond the clip on both sides."""
    rows = [
        {
            "group_index": prompt,
            "rollout_id": rollout,
            "index": rollout,
            "reward": reward,
            "tokens": [5] * (1 + len(mask)),
            "response_length": len(mask),
            "loss_mask": mask,
        }
        for prompt, rollout, reward, masks in ROLLOUTS
        for mask in masks
    ]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["loss_mask"]) for row in rows], batch_first=True)
    position = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape)
    old = -1.0 - 0.5 * torch.sin(position)
    return Batch(rows, mask, old, old + 0.4 * torch.cos(1.7 * position))


def trained(batch: Batch, advantages: Tensor, loss: Callable[[Tensor], Tensor]) -> Outcome:
    """The outcome of a loss, a function of the log-probs."""
    new = batch.new.clone().requires_grad_()
    value = loss(new)
    value.backward()
    assert new.grad is not None
    return Outcome(advantages, value.detach(), new.grad)


def token_losses(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    """The clipped loss of each token; ``advantages`` ``[N]`` or ``[N, T]``."""
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    return clipped_loss(new, batch.old, advantages.double(), batch.mask, clip=CLIP)[0]


def miles_norm_alone(batch: Batch) -> Outcome:
    """The reference: advantages and weights of the library, in a trainer of one's own."""
    result = normalize_rewards(batch.rows)
    weights = loss_weights(result)

    def loss(new: Tensor) -> Tensor:
        return reduce_token_losses(token_losses(batch, new, result.advantages), weights, batch.mask)

    return trained(batch, result.advantages, loss)


def advantages_alone(batch: Batch) -> Outcome:
    """A trainer that takes advantages and sums over tokens."""
    result = normalize_rewards(batch.rows)
    scaled = scale_advantages(result.advantages, batch.mask, loss_weights(result))
    assert isinstance(scaled, Tensor)
    return trained(batch, result.advantages, lambda new: token_losses(batch, new, scaled).sum())


def per_rollout_mean(batch: Batch, advantages: Tensor, ids: list[int], mask_sums: list[int]) -> Outcome:
    """The rule of Miles' and slime's trainers: a row by the tokens of its rollout, the step by its distinct ids."""

    def loss(new: Tensor) -> Tensor:
        per_row = (token_losses(batch, new, advantages) * batch.mask).sum(dim=1)
        return (per_row / torch.tensor(mask_sums).clamp_min(1)).sum() / len(set(ids))

    return trained(batch, advantages, loss)


def miles_rewards(batch: Batch) -> Outcome:
    """The reward hook; ids and sums come from the trainer's own conversion."""
    _, rewards = miles.post_process_rewards(FLAGS, batch.rows)
    ids = [row["rollout_id"] for row in batch.rows]
    totals = dict.fromkeys(ids, 0)
    for row in batch.rows:
        totals[row["rollout_id"]] += sum(row["loss_mask"])
    return per_rollout_mean(batch, torch.tensor(rewards), ids, [totals[rollout] for rollout in ids])


def miles_train_data(batch: Batch) -> Outcome:
    """The convert hook."""
    data = miles.convert_samples_to_train_data(FLAGS, batch.rows)
    return per_rollout_mean(batch, torch.tensor(data["rewards"]), data["rollout_ids"], data["rollout_mask_sums"])


def slime_advantages(batch: Batch) -> Outcome:
    """The convert hook, then slime's advantage function in the trainer."""
    data = miles.convert_samples_to_train_data(FLAGS, batch.rows)
    data["kl"] = [torch.zeros(length) for length in data["response_lengths"]]
    slime.compute_advantages(FLAGS, data)
    advantages = torch.stack([row[0] for row in data["advantages"]])
    return per_rollout_mean(batch, advantages, data["rollout_ids"], data["rollout_mask_sums"])


def agent_lightning_drop_ins(batch: Batch) -> Outcome:
    """Both drop-ins, dividing by rollouts; its loss is summed over tokens."""
    rewards = torch.zeros(batch.mask.shape)
    rewards[:, 0] = torch.tensor([row["reward"] for row in batch.rows])
    ids = [row["rollout_id"] for row in batch.rows]
    data = SimpleNamespace(
        batch={"response_mask": batch.mask, "token_level_rewards": rewards},
        non_tensor_batch={"rollout_id_list": ids, "uid": [row["group_index"] for row in batch.rows]},
    )
    agent_lightning.compute_rollout_level_advantage(data, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=3)
    advantages = data.batch["advantages"]
    scaled = agent_lightning.normalize_advantages_by_rollout(
        advantages, batch.mask, ids, num_trained_rows=len(ids), divisor="rollouts"
    )
    of_rows = advantages.gather(1, batch.mask.argmax(dim=1, keepdim=True))[:, 0]
    return trained(batch, of_rows, lambda new: token_losses(batch, new, scaled).sum())


def framework(function: str) -> Callable[[Batch], Outcome]:
    """A function of ``parity_frameworks.py``, which runs the framework's own code."""

    def run(batch: Batch) -> Outcome:
        return Outcome(*runpy.run_path(str(Path(__file__).with_name("parity_frameworks.py")))[function](batch))

    return run


INTEGRATIONS = (
    Integration("miles_norm, a trainer of one's own", miles_norm_alone),
    Integration("miles_norm, advantages alone", advantages_alone),
    Integration("Miles, reward hook", miles_rewards),
    Integration("Miles, convert hook", miles_train_data),
    Integration("slime, convert hook and advantage function", slime_advantages),
    Integration("Agent Lightning, both drop-ins", agent_lightning_drop_ins),
    Integration("verl, estimator and policy loss", framework("verl_outcome"), "verl"),
    Integration("TRL, trainer", framework("trl_outcome"), "trl"),
)


def table(integrations: tuple[Integration, ...] = INTEGRATIONS) -> str:
    """The table in Markdown; every outcome is compared with that of the first integration."""
    batch = ragged_batch()
    reference = INTEGRATIONS[0].run(batch)
    lines = ["| integration | advantages | loss | gradient |", "|---|---|---|---|"]
    for integration in integrations:
        if integration.package is not None and find_spec(integration.package) is None:
            lines.append(f"| {integration.name} | not installed | | |")
            continue
        outcome = integration.run(batch)
        same = torch.equal(outcome.advantages.view(torch.int32), reference.advantages.view(torch.int32))
        cells = [
            "same bits" if same else f"off by {float((outcome.advantages - reference.advantages).abs().max()):.1e}",
            f"{float(outcome.loss):.6f}",
            f"{float(outcome.gradient.norm()):.6f}, {_difference(outcome.gradient, reference.gradient)}",
        ]
        lines.append(f"| {integration.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _difference(gradient: Tensor, reference: Tensor) -> str:
    worst = float((gradient - reference).abs().max() / reference.abs().max())
    return "same to 1e-6" if worst <= 1e-6 else f"off by {worst:.1e}"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
