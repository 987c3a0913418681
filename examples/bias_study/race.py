"""The environment: a race between right and wrong decisions, whose policy gradient is known exactly.

A rollout is a chain of decisions. The policy decides rightly with probability ``sigmoid(theta . x - difficulty)``,
where x says of which kind the prompt is and what has happened so far. Four right decisions end the rollout with reward
1, six wrong ones with 0. Right decisions are written in few tokens and wrong ones in many, so failures are long. Only
the first token of a decision is a choice; of the others the policy is certain, so their score, the gradient of the
log-probability, is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIGHT, WRONG = 4, 6
"""Decisions that end a rollout."""
RIGHT_TOKENS, WRONG_TOKENS = 2, 6
"""Tokens in which one is written."""
MAX_DECISIONS = RIGHT + WRONG - 1
MAX_TOKENS = (RIGHT - 1) * RIGHT_TOKENS + WRONG * WRONG_TOKENS

DIFFICULTY = torch.linspace(-1, 2, 8, dtype=torch.float64)
"""One prompt each, from easy to hard."""
KIND = torch.eye(4, dtype=torch.float64).repeat_interleave(2, dim=0)
"""Prompts of one kind, two each, share a parameter."""
THETA = torch.tensor([0.0, 0.0, 0.0, 0.0, -0.3, 0.6], dtype=torch.float64)
"""The policy that is studied: a parameter for each kind, one for after a mistake, one for what was right so far."""


def features(prompt: Tensor, right: Tensor, mistake: Tensor) -> Tensor:
    """What decisions depend on beside the difficulty: float64 ``[R, 6]`` for numbers of prompts and states ``[R]``."""
    return torch.cat([KIND[prompt], mistake[:, None], right[:, None] / RIGHT], dim=1)


@dataclass(frozen=True)
class Exact:
    """What is known without sampling, in the mean over prompts."""

    success_rates: Tensor
    """Of each prompt."""
    success: float
    tokens: float
    """Of a rollout."""
    gradient: Tensor
    """Of the success rate, by the parameters: the true on-policy gradient."""


def exact(theta: Tensor = THETA) -> Exact:
    """Add up the probabilities of all states, and differentiate the sum."""
    theta = theta.detach().requires_grad_()
    success_rates, tokens = _ends(theta)
    success = success_rates.mean()
    (gradient,) = torch.autograd.grad(success, theta)
    return Exact(success_rates.detach(), float(success.detach()), float(tokens.detach().mean()), gradient)


def _ends(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Success rate and expected tokens of each prompt."""
    prompt, nothing = torch.arange(len(DIFFICULTY)), torch.zeros_like(DIFFICULTY)
    success, tokens = nothing, nothing
    # Probability of each state: right and wrong decisions so far, and whether the last one was a mistake.
    states = {(0, 0, 0): torch.ones_like(DIFFICULTY)}
    for _ in range(MAX_DECISIONS):
        following: dict[tuple[int, int, int], Tensor] = {}
        for (right, wrong, mistake), probability in states.items():
            x = features(prompt, nothing + right, nothing + mistake)
            p = torch.sigmoid(x @ theta - DIFFICULTY)
            for end, share in (((right + 1, wrong, 0), p), ((right, wrong + 1, 1), 1 - p)):
                following[end] = following.get(end, nothing) + probability * share
        states = {}
        for (right, wrong, mistake), probability in following.items():
            if right < RIGHT and wrong < WRONG:
                states[right, wrong, mistake] = probability
                continue
            success = success + probability * (right == RIGHT)
            tokens = tokens + probability * (right * RIGHT_TOKENS + wrong * WRONG_TOKENS)
    return success, tokens


@dataclass(frozen=True)
class Rollouts:
    """Sampled rollouts, R of them with at most D decisions."""

    reward: Tensor
    """float64 ``[R]``: 0 or 1."""
    tokens: Tensor
    """int64 ``[R]``."""
    scores: Tensor
    """float64 ``[R, D, 6]``: gradient of the log-probability of each decision; 0 after the end."""
    starts: Tensor
    """int64 ``[R, D]``: which token of the rollout is the choice; 0 after the end."""


def sample(prompt: Tensor, generator: torch.Generator, theta: Tensor = THETA) -> Rollouts:
    """One rollout for each number of a prompt ``[R]``."""
    difficulty = DIFFICULTY[prompt]
    right, wrong, mistake, tokens = (torch.zeros_like(difficulty) for _ in range(4))
    scores, starts = [], []
    for _ in range(MAX_DECISIONS):
        running = ((right < RIGHT) & (wrong < WRONG)).to(torch.float64)
        x = features(prompt, right, mistake)
        p = torch.sigmoid(x @ theta - difficulty)
        decision = (torch.rand(p.shape, generator=generator, dtype=torch.float64) < p).to(torch.float64)
        scores.append(((decision - p) * running)[:, None] * x)
        starts.append(tokens * running)
        right = right + decision * running
        wrong = wrong + (1 - decision) * running
        tokens = right * RIGHT_TOKENS + wrong * WRONG_TOKENS
        mistake = 1 - decision
    return Rollouts(
        reward=(right == RIGHT).to(torch.float64),
        tokens=tokens.to(torch.int64),
        scores=torch.stack(scores, dim=1),
        starts=torch.stack(starts, dim=1).to(torch.int64),
    )
