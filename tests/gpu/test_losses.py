"""On a GPU: losses, gradients and weights are those of the CPU, the host waits for nothing, and bad values are NaN."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_norm import LossConfig, RolloutColumns, loss_weights, normalize_columns
from miles_norm.loss import (
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    reduce_token_losses,
    rollout_sequences,
    row_of_tokens,
    row_sequences,
    truncated_importance_sampling,
)
from miles_norm.result import NormalizedRewards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, WIDTH = 64, 33
LOSSES: dict[str, Callable[..., Any]] = {
    "clipped": lambda new, old, a, mask: clipped_loss(new, old, a, mask, dual_clip=3.0),
    "cispo": lambda new, old, a, mask: cispo_loss(new, old, a, mask, clip=(0.2, 0.2)),
    "gspo": lambda new, old, a, mask: gspo_loss(new, old, a, mask, row_sequences(mask), clip=(0.2, 0.2)),
    "kl": lambda new, old, _a, mask: kl_loss(new, old, mask),
    "importance": lambda new, old, a, mask: truncated_importance_sampling(a * new, old, new.detach(), mask),
}


@contextmanager
def no_waits() -> Iterator[None]:
    """An operation that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.randint(0, 2, (ROWS, WIDTH), generator=generator)
    return [*(tensor.to(device) for tensor in values), mask.to(device)]


def result(device: str) -> NormalizedRewards:
    rollout = torch.arange(ROWS, device=device) // 3
    columns = RolloutColumns(
        group=rollout // 4, rollout=rollout, reward=(rollout % 2).double(), trainable_tokens=batch(device)[3].sum(dim=1)
    )
    return normalize_columns(columns)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_without_a_wait(name: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        new, old, advantages, mask = batch(device)
        weights = loss_weights(result(device))
        new.requires_grad_()
        torch.cuda.synchronize()
        with no_waits() if device == "cuda" else nullcontext():
            losses, _ = LOSSES[name](new, old, advantages, mask)
            reduce_token_losses(losses, weights, mask).backward()
        assert new.grad is not None
        found.append((losses.detach().cpu(), new.grad.cpu()))
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-12, atol=1e-14)


def test_packed_rollouts_without_a_wait() -> None:
    found = []
    for device in ("cpu", "cuda"):
        new, old, advantages, mask = batch(device)
        normalized = result(device)
        sequences = rollout_sequences(normalized, torch.arange(ROWS, device=device))
        ends = torch.arange(0, ROWS * WIDTH + 1, WIDTH, device=device)
        weights = loss_weights(normalized)
        torch.cuda.synchronize()
        with no_waits() if device == "cuda" else nullcontext():
            rows = row_of_tokens(ends, ROWS * WIDTH)
            packed = rollout_sequences(normalized, torch.arange(ROWS, device=device), rows=rows)
            ratio = torch.zeros(len(packed.tokens), device=device)
            flat = [tensor.flatten() for tensor in (new, old, advantages, mask)]
            losses, _ = gspo_loss(*flat, type(packed)(packed.index, packed.tokens, ratio))  # type: ignore[arg-type]
            loss = reduce_token_losses(losses, weights, flat[3], rows=rows)
        assert torch.equal(sequences.tokens.cpu(), packed.tokens.cpu())
        found.append(loss.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("settings", [{}, {"aggregation": "token_mean"}, {"aggregation": "sample_mean"}])
def test_weights(settings: dict[str, Any]) -> None:
    cpu, gpu = (loss_weights(result(device), LossConfig(**settings)).cpu() for device in ("cpu", "cuda"))
    torch.testing.assert_close(gpu, cpu, rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_value_that_no_trainable_token_has_is_nan(name: str, value: float) -> None:
    new, old, advantages, mask = batch("cuda")
    mask[:2, 0] = 1
    good, _ = LOSSES[name](new, old, advantages, mask)
    old[1, 0] = value
    new.requires_grad_()
    losses, _ = LOSSES[name](new, old, advantages, mask)
    losses.sum().backward()
    assert new.grad is not None
    assert torch.isnan(losses[1, 0])
    assert torch.equal(losses[0], good[0])
    assert torch.isfinite(new.grad[0]).all()


def test_a_weight_below_0_of_a_trained_row_is_nan() -> None:
    losses, mask = torch.ones(2, 2, device="cuda"), torch.tensor([[1, 1], [0, 0]], device="cuda")
    assert torch.isnan(reduce_token_losses(losses, torch.tensor([-0.5, 1.0], device="cuda"), mask))
    assert reduce_token_losses(losses, torch.tensor([0.5, math.nan], device="cuda"), mask).item() == 1.0
