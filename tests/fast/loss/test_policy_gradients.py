"""Gradients of policy losses, layouts of tokens, masked entries, and what is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from miles_norm.errors import ConfigError, SampleError
from miles_norm.loss import (
    Sequences,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    row_of_tokens,
    row_sequences,
    sequence_log_ratio,
    truncated_importance_sampling,
)


def grad_inputs(rows: int = 3, width: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratios on both sides of every bound, none at one."""
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.randint(0, 2, (rows, width), generator=generator)
    return new, torch.where(mask == 0, torch.nan, old), torch.where(mask == 0, torch.nan, advantages), mask


def test_gradients_of_losses_whose_ratio_is_differentiated() -> None:
    new, old, advantages, mask = grad_inputs()
    for settings in ({}, {"clip": (0.1, 0.4)}, {"dual_clip": 1.2}):
        assert torch.autograd.gradcheck(lambda x, s=settings: clipped_loss(x, old, advantages, mask, **s)[0], (new,))
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, k=kind: kl_loss(x, old, mask, kind=k)[0], (new,))
    assert torch.autograd.gradcheck(
        lambda x: truncated_importance_sampling(x, old, torch.zeros_like(old), mask)[0], (new,)
    )


def test_gradients_of_losses_with_a_frozen_ratio() -> None:
    """gradcheck would move the frozen part too, so it gets a function in which that part stays where it is."""
    new, old, advantages, mask = grad_inputs()
    safe = torch.where(mask == 0, 0.0, old)
    ratio = (new.detach() - safe).exp().clamp(0.5, 1.5)
    frozen = (-ratio * torch.where(mask == 0, 0.0, advantages)).detach()
    losses, _ = cispo_loss(new, old, advantages, mask, clip=(0.5, 0.5))
    (ours,) = torch.autograd.grad(losses.sum(), new)
    assert torch.autograd.gradcheck(lambda x: frozen * x, (new,))
    torch.testing.assert_close(ours, frozen * mask, rtol=1e-13, atol=0)


def test_gradients_of_gspo() -> None:
    """With the log-ratio frozen beforehand, as for micro-batches: each token moves its own factor."""
    new, old, advantages, mask = grad_inputs()
    rows = row_sequences(mask)
    log_ratio = sequence_log_ratio(new, old, mask, rows)
    frozen = Sequences(rows.index, rows.tokens, log_ratio)
    losses, _ = gspo_loss(new, old, advantages, mask, frozen, clip=(0.2, 0.2))
    (ours,) = torch.autograd.grad(losses.sum(), new)
    start = new.detach().clone()  # gradcheck moves the entries of new in place
    factor, advantage = log_ratio.exp()[:, None], torch.where(mask == 0, 0.0, advantages)

    def loss(x: Tensor) -> Tensor:
        ratio = factor * (x - start).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask

    assert torch.autograd.gradcheck(loss, (new,))
    (expected,) = torch.autograd.grad(loss(new).sum(), new)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    assert torch.count_nonzero(ours) > 0


LOSSES: dict[str, Callable[..., Tensor]] = {
    "clipped": lambda new, old, a, mask, _: clipped_loss(new, old, a, mask)[0],
    "cispo": lambda new, old, a, mask, _: cispo_loss(new, old, a, mask, clip=(0.2, 0.2))[0],
    "gspo": lambda new, old, a, mask, s: gspo_loss(new, old, a, mask, s, clip=(0.2, 0.2))[0],
    "kl": lambda new, old, _a, mask, _: kl_loss(new, old, mask)[0],
    "importance": lambda new, old, a, mask, _: truncated_importance_sampling(a * new, old, new.detach(), mask)[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_packed_tokens_have_the_losses_of_padded_ones(name: str) -> None:
    new, old, advantages, mask = grad_inputs()
    lengths = torch.tensor([4, 0, 2])
    inside = torch.arange(4) < lengths[:, None]
    rows = row_of_tokens(torch.tensor([0, 4, 4, 6]), 6)
    padded = LOSSES[name](new, old, advantages, mask * inside, row_sequences(mask * inside))
    packed_mask = mask[inside]
    packed = LOSSES[name](
        new[inside], old[inside], advantages[inside], packed_mask, row_sequences(packed_mask, rows, num_rows=3)
    )
    assert torch.equal(packed, padded[inside])
    assert torch.count_nonzero(packed) > 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_micro_batch_without_tokens(name: str, shape: tuple[int, int]) -> None:
    new, rest = torch.zeros(shape, requires_grad=True), torch.zeros(shape)
    losses = LOSSES[name](new, rest, rest, rest, row_sequences(rest))
    losses.sum().backward()
    assert losses.shape == shape
    assert new.grad is not None


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_may_hold_anything(name: str) -> None:
    for anything in (math.nan, math.inf, -math.inf):
        new = torch.tensor([[0.5, anything]], requires_grad=True)
        other = torch.tensor([[0.25, anything]])
        losses = LOSSES[name](new, other, other, torch.tensor([[1, 0]]), row_sequences(torch.tensor([[1, 0]])))
        assert losses[0, 1] == 0
        assert torch.isfinite(losses).all()
        losses.sum().backward()
        assert new.grad is not None
        assert name == "importance" or new.grad[0, 1] == 0  # the caller's own product there is the caller's


def test_a_ratio_beyond_every_bound_keeps_gradients_finite() -> None:
    new = torch.tensor([200.0, -200.0], requires_grad=True)
    losses, metrics = clipped_loss(new, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.2, 0.8])
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0]
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(20))


def test_half_precision_is_computed_in_float32() -> None:
    new = torch.tensor([0.1, 0.3], dtype=torch.bfloat16, requires_grad=True)
    losses, _ = clipped_loss(new, torch.zeros(2), torch.ones(2), torch.ones(2))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([-math.exp(new.tolist()[0]), -1.2], rel=1e-6)
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: clipped_loss(x, x[:1], x, x),
            r"old_log_probs\n.*shape \[1, 2\] on cpu\n.*the shape of log_probs, \[2, 2\]",
        ),
        (lambda x: clipped_loss(x, x, x[0], x), r"advantages\n.*shape \[2\]"),
        (lambda x: clipped_loss(x, x, x, x[0]), r"mask\n.*shape \[2\]"),
        (lambda x: kl_loss(x, x[:, :1], x), r"reference_log_probs\n.*shape \[2, 1\]"),
        (
            lambda x: gspo_loss(x, x, x, x, Sequences(torch.zeros(3, dtype=torch.int64), torch.ones(1))),
            "sequence index",
        ),
        (lambda x: gspo_loss(x[0], x[0], x[0], x[0], Sequences(torch.tensor([0]), torch.ones(1))), "sequence index"),
        (lambda x: gspo_loss(x, x, x, x, Sequences(torch.tensor([0]), torch.ones(1), torch.ones(1))), "sequence index"),
        (lambda x: gspo_loss(x, x, x, x, Sequences(torch.tensor([0, 0]), torch.ones(1), torch.ones(2))), "log_ratio"),
        (lambda x: row_sequences(x[0]), r"mask\n"),
        (lambda x: row_sequences(x[0], torch.tensor([0, 1])), "row index"),
        (lambda x: row_sequences(x[0], torch.tensor([0]), 1), "row index"),
    ],
)
def test_other_shapes_are_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        call(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: clipped_loss(x, x, x, x, clip=(-0.1, 0.2)), r"clip\n.*\(-0.1, 0.2\)"),
        (lambda x: cispo_loss(x, x, x, x, clip=(0.2, -1)), r"clip\n.*\(0.2, -1\)"),
        (lambda x: clipped_loss(x, x, x, x, dual_clip=1.0), r"dual_clip\n.*1.0"),
        (lambda x: kl_loss(x, x, x, kind="k4"), r"kind of KL estimate\n.*'k4'"),
        (lambda x: truncated_importance_sampling(x, x, x, x, bounds=(2.0, 1.0)), r"bounds\n.*\(2.0, 1.0\)"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(torch.ones(2))
