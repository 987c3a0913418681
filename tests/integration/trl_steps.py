"""Rows of several rollouts for TRL, and the gradient of their loss without TRL."""

from typing import Any

import torch
from torch import Tensor
from trl_models import log_prob_sums, model, tokenizer

from miles_norm.integrations.trl import fill_rows

Rows = list[tuple[list[int], list[int], list[int]]]

P, Q = [4, 5], [6, 7, 8]
# Per prompt its rollouts: rows of prompt, completion and mask, and the reward. Trainable tokens 3, 6, 4 and 4, 2.
FIVE_ROLLOUTS: dict[str, list[tuple[Rows, float]]] = {
    "w0 w1": [
        ([(P, [10, 11, 12], [1, 1, 1])], 1.0),
        ([(P, [13, 14, 15, 16, 1], [1, 0, 1, 1, 1]), ([*P, 9], [17, 18], [1, 1])], 0.0),
        ([(P, [19, 20, 21, 22], [1, 1, 1, 1])], 0.5),
    ],
    "w2 w3 w4": [
        ([(Q, [23, 24, 25, 26, 27], [0, 1, 1, 1, 1])], 0.25),
        ([(Q, [28, 29], [1, 1])], 0.75),
    ],
}


def rollout_function(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The rollouts of each prompt, in as many rows as TRL wants."""
    size = trainer.num_generations
    groups = [[rows_with_reward(*rollout) for rollout in FIVE_ROLLOUTS[prompt]] for prompt in prompts[::size]]
    return fill_rows(groups, size, tokenizer().pad_token_id)


def rows_with_reward(rows: Rows, reward: float) -> list[dict[str, Any]]:
    """A rollout as ``fill_rows`` takes it."""
    return [
        {"prompt_ids": p, "completion_ids": c, "logprobs": [0.0] * len(c), "env_mask": m, "outcome": reward}
        for p, c, m in rows
    ]


def rewards_of(outcome: list[float | None], **_: Any) -> list[float]:
    """What the rollout function said; a padding row may say anything."""
    return [0.0 if value is None else value for value in outcome]


def rows_by_completion() -> dict[tuple[int, ...], tuple[str, int]]:
    return {
        tuple(completion): (prompt, number)
        for prompt, group in FIVE_ROLLOUTS.items()
        for number, (rows, _) in enumerate(group)
        for _, completion, _ in rows
    }


def gradient_of_rollouts(rollouts: list[Rows], advantages: list[float]) -> dict[str, Tensor]:
    """Of the mean over rollouts of the mean over their tokens of minus advantage times ratio, at a ratio of 1."""
    subject = model()
    loss = torch.zeros(())
    for rows, advantage in zip(rollouts, advantages, strict=True):
        tokens = sum(sum(mask) for *_, mask in rows)
        loss = loss - advantage * torch.stack(log_prob_sums(subject, rows)).sum() / tokens / len(rollouts)
    loss.backward()
    return {name: parameter.grad for name, parameter in subject.named_parameters()}


def check_gradient(gradient: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradient.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.count_nonzero(value) > 0
        torch.testing.assert_close(gradient[name], value, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
