"""A ragged batch for the functions of docs/integrations/parity_frameworks.py, and what they have to give."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from miles_norm import loss_weights, normalize_rewards
from miles_norm.loss import clipped_loss, reduce_token_losses

# Prompt, rollout, reward, masks of rows.
ROLLOUTS = [
    (0, 0, 1.0, [[1, 1, 0, 1]]),
    (0, 1, 0.0, [[1, 1], [0, 1, 1, 1, 1], [1]]),
    (0, 2, 0.25, [[1, 0, 0, 1], [1, 1, 1]]),
    (1, 3, 0.75, [[1, 1, 1, 1, 1, 1], [1, 1]]),
    (1, 4, 0.125, [[1, 0, 1]]),
]


def ragged_batch() -> Any:
    rows = [
        {"group_index": prompt, "rollout_id": rollout, "reward": reward, "loss_mask": mask}
        for prompt, rollout, reward, masks in ROLLOUTS
        for mask in masks
    ]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["loss_mask"]) for row in rows], batch_first=True)
    position = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape)
    old = -1.0 - 0.5 * torch.sin(position)
    return SimpleNamespace(rows=rows, mask=mask, old=old, new=old + 0.4 * torch.cos(1.7 * position))


def check_outcome(name: str) -> None:
    """A framework trains on the bits of our advantages, and on our loss."""
    path = Path(__file__).parents[2] / "docs" / "integrations" / "parity_frameworks.py"
    spec = importlib.util.spec_from_file_location("parity_frameworks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batch = ragged_batch()
    advantages, loss, gradient = getattr(module, name)(batch)
    result, new = normalize_rewards(batch.rows), batch.new.clone().requires_grad_()
    losses, metrics = clipped_loss(new, batch.old, result.advantages[:, None].double(), batch.mask)
    expected = reduce_token_losses(losses, loss_weights(result), batch.mask)
    assert metrics["clip_fraction"] > 0
    assert torch.equal(advantages.view(torch.int32), result.advantages.view(torch.int32))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, new)[0], rtol=1e-6, atol=1e-9)
