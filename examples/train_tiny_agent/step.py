"""One step of the training: rollouts, normalized rewards, loss weights, and updates that hold whole rollouts."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "session_v2_agentic"))

from agent import open_boxes
from learners import Learner

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    Sample,
    UpdateConfig,
    loss_weights,
    normalize_rewards,
    plan_updates,
)
from miles_norm.audit import baseline_advantages
from miles_norm.loss import clipped_loss, reduce_token_losses
from miles_norm.session.rollout import RolloutOptions, run_rollouts

Normalization = Literal["rows", "rollout_advantages", "rollouts"]
NORMALIZATIONS: dict[Normalization, tuple[str | None, str]] = {
    "rows": ("rows", "sample_mean"),
    "rollout_advantages": (None, "sample_mean"),
    "rollouts": (None, "rollout_mean"),
}
"""The baseline whose advantages are taken, None for one per rollout, and the aggregation of the loss."""


@dataclass(frozen=True)
class Settings:
    """What a run is; a run that is resumed has the same ones, but for ``steps``."""

    steps: int = 25
    seed: int = 0
    normalization: Normalization = "rollouts"
    prompts_per_step: int = 8
    rollouts_per_prompt: int = 8
    rollouts_per_update: int = 32
    learning_rate: float = 5e-4
    max_grad_norm: float = 1.0


def prompts_of(rng: random.Random, number: int) -> list[str]:
    """Tasks of one to three boxes, each kind as often as the others."""
    return ["open box " + " and ".join(map(str, rng.sample(range(10), 1 + n % 3))) for n in range(number)]


async def agent(**called: Any) -> dict[str, Any]:
    """``open_boxes`` with a reward for every box that was opened; ``success`` is 1 if all were."""
    outcome = await open_boxes(**called)
    boxes = called["prompt"].split("box ")[1].split(" and ")
    return {"reward": len(outcome["opened"]) / len(boxes), "success": outcome["reward"]}


async def roll_out(address: str, prompts: Sequence[str], samples: int, seed: int, **options: Any) -> list[Sample]:
    """The agent on each prompt, several times."""
    chosen = RolloutOptions(n_samples_per_prompt=samples, seed=seed, request_kwargs={"max_tokens": 40}, **options)
    return await run_rollouts(agent, prompts, address, chosen)


def update(
    learner: Learner, optimizer: torch.optim.Optimizer, rows: Sequence[Sample], settings: Settings
) -> dict[str, float]:
    """All optimizer steps on the rows of a step; what to log."""
    baseline, aggregation = NORMALIZATIONS[settings.normalization]
    result = normalize_rewards(rows, NormalizationConfig(missing_reward="exclude"))
    advantages = result.advantages if baseline is None else baseline_advantages(result, baseline)
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=settings.rollouts_per_update))
    weights = loss_weights(result, LossConfig(aggregation=aggregation), plan=plan)
    tokens, trained, sampled = padded(rows)
    metrics: dict[str, float] = {}
    difference = 0.0
    for number, held in enumerate(plan.updates):
        n = torch.tensor(held)
        mask = trained[n]
        row = mask.nonzero()[:, 0]
        new, old = learner.log_probs(tokens[n], mask), sampled[n][mask]
        if number == 0:  # nothing has been trained since these were sampled
            difference = float((new.detach() - old).abs().max())
        losses, of_loss = clipped_loss(new, old, advantages[n][row], torch.ones_like(old))
        optimizer.zero_grad()
        reduce_token_losses(losses, weights[n], torch.ones_like(old), rows=row).backward()
        norm = torch.nn.utils.clip_grad_norm_(learner.model.parameters(), settings.max_grad_norm)
        optimizer.step()
        metrics = {"train/clip_fraction": float(of_loss["clip_fraction"]), "train/grad_norm": float(norm)}
    return {
        "train/success": success_of(rows),
        "train/log_prob_difference": difference,
        "train/updates": len(plan.updates),
        **metrics,
        **result.metrics(),
    }


def success_of(rows: Sequence[Sample]) -> float:
    """Share of rollouts that opened every box; one that was aborted has not."""
    success = {row.rollout_id: row.metadata.get("success", 0.0) for row in rows}
    return sum(success.values()) / len(success)


def padded(rows: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``[N, T]``, which of them are trained, and the log-probs that they were sampled with."""
    length = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    trained = torch.zeros(len(rows), length, dtype=torch.bool)
    sampled = torch.zeros(len(rows), length)
    for n, row in enumerate(rows):
        end, start = len(row.tokens), len(row.tokens) - row.response_length
        tokens[n, :end] = torch.from_numpy(np.asarray(row.tokens, dtype=np.int64))
        trained[n, start:end] = torch.from_numpy(np.asarray(row.loss_mask, dtype=np.bool_))
        sampled[n, start:end] = torch.from_numpy(np.asarray(row.rollout_log_probs, dtype=np.float32))
    return tokens, trained, sampled
