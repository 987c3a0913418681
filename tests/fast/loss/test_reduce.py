"""Reduction over micro-batches and what trainers divide by; advantages that carry the weights."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.errors import ConfigError, SampleError
from miles_norm.loss import (
    cispo_loss,
    clipped_loss,
    loss_factor,
    reduce_token_losses,
    row_of_tokens,
    scale_advantages,
)


def test_padded_and_packed_tokens_give_the_same_loss() -> None:
    # 1/4 (1 + 2) + 1/2 (4) = 2.75; the masked 9 and the padding count for nothing.
    weights = torch.tensor([0.25, 0.5], dtype=torch.float64)
    padded = reduce_token_losses(torch.tensor([[1.0, 2.0], [4.0, 9.0]]), weights, torch.tensor([[1, 1], [1, 0]]))
    rows = row_of_tokens(torch.tensor([0, 2, 4]), 4)
    packed = reduce_token_losses(torch.tensor([1.0, 2.0, 4.0, 9.0]), weights, torch.tensor([1, 1, 1, 0]), rows=rows)
    assert float(padded) == float(packed) == 2.75


def test_masked_losses_may_hold_anything() -> None:
    losses = torch.tensor([[1.0, math.nan]], requires_grad=True)
    loss = reduce_token_losses(losses, torch.ones(1), torch.tensor([[1, 0]]))
    loss.backward()
    assert loss.item() == 1.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_micro_batch_contributes_zero(rows: int) -> None:
    """No row at all, or one with a mask of 0."""
    layer = torch.nn.Linear(3, 1)
    losses = layer(torch.ones(rows, 5, 3))[..., 0]
    loss = reduce_token_losses(losses, torch.ones(rows), torch.zeros(rows, 5))
    loss.backward()
    assert loss.item() == 0.0
    assert [parameter.grad.abs().max().item() for parameter in layer.parameters()] == [0.0, 0.0]  # type: ignore[union-attr]


def test_half_precision_is_summed_in_float32() -> None:
    losses = torch.ones(1, 1000, dtype=torch.bfloat16)
    loss = reduce_token_losses(losses, torch.tensor([1e-3], dtype=torch.float64), torch.ones(1, 1000))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"trainer": "ddp", "data_parallel": 4}, 4),
        ({"trainer": "ddp", "data_parallel": 4, "micro_batches": 3}, 4),
        ({"trainer": "fsdp", "data_parallel": 4, "context_parallel": 2}, 8),
        ({"trainer": "accelerate", "data_parallel": 4, "micro_batches": 3}, 12),
        ({"trainer": "megatron", "data_parallel": 4, "context_parallel": 2, "micro_batches": 3}, 24),
        ({"trainer": "megatron_per_token", "data_parallel": 4, "reported_tokens": 100}, 100),
    ],
)
def test_factor(settings: dict[str, Any], factor: int) -> None:
    assert loss_factor(**settings) == factor


@given(st.lists(st.lists(st.integers(1, 50), min_size=2, max_size=2), min_size=1, max_size=6), st.integers(1, 2))
def test_the_factor_undoes_what_the_trainer_does(counts: list[list[int]], context: int) -> None:
    """Each trainer acted out on numbers: ranks with two micro-batches of one gradient each."""
    ranks = [[float(a), float(b)] for a, b in counts for _ in range(context)]
    total = sum(map(sum, ranks))
    sizes = {"data_parallel": len(counts), "context_parallel": context}
    ddp = sum(sum(loss_factor("ddp", **sizes) * g for g in rank) for rank in ranks) / len(ranks)
    assert ddp == pytest.approx(total)
    accelerate = loss_factor("accelerate", **sizes, micro_batches=2)
    assert sum(sum(accelerate * g / 2 for g in rank) for rank in ranks) / len(ranks) == pytest.approx(total)
    megatron = loss_factor("megatron", **sizes, micro_batches=2)
    assert sum(sum(megatron * g / 1 / 2 for g in rank) for rank in ranks) / len(ranks) == pytest.approx(total)
    # The token counts that come with the losses are all added up, whatever they count.
    reported = len(ranks) * 2 * 7
    per_token = loss_factor("megatron_per_token", **sizes, micro_batches=2, reported_tokens=reported)
    assert sum(sum(per_token * g for g in rank) for rank in ranks) / reported == pytest.approx(total)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": "ddp", "data_parallel": 0}, r"data_parallel of loss_factor\n.*0"),
        ({"trainer": "ddp", "reported_tokens": 5}, r"reported_tokens of loss_factor\n.*5 with trainer='ddp'"),
        ({"trainer": "megatron_per_token"}, r"reported_tokens of loss_factor\n.*None"),
        ({"trainer": "megatron_per_token", "reported_tokens": 0}, r"reported_tokens of loss_factor\n.*0"),
        ({"trainer": "zero"}, r"trainer of loss_factor\n.*'zero'\n.*ddp, fsdp, accelerate, megatron"),
    ],
)
def test_factors_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_factor(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(3), torch.ones(2, 3), None), r"row values\n.*shape \[3\]"),
        ((torch.ones(6), torch.ones(2), torch.ones(6), None), r"row values\n.*shape \[2\]"),
        ((torch.ones(6), torch.ones(2), torch.ones(6), torch.zeros(2, dtype=torch.int64)), r"row index\n.*shape \[2\]"),
        ((torch.ones(2, 3), torch.ones(2), torch.ones(3), None), r"mask\n.*shape \[3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    losses, weights, mask, rows = arguments
    with pytest.raises(SampleError, match=message):
        reduce_token_losses(losses, weights, mask, rows=rows)


def test_scaled_advantages_in_every_form_of_masks() -> None:
    advantages, weights = torch.tensor([2.0, -1.0]), torch.tensor([0.25, 0.5], dtype=torch.float64)
    padded = scale_advantages(advantages, torch.tensor([[1, 1, 0], [0, 1, 0]]), weights)
    assert isinstance(padded, torch.Tensor)
    assert (padded.dtype, padded.tolist()) == (torch.float32, [[0.5, 0.5, 0.0], [0.0, -0.5, 0.0]])
    ragged = scale_advantages(advantages, [[1, 1], [0, 1, 0]], weights)
    assert [row.tolist() for row in ragged] == [[0.5, 0.5], [0.0, -0.5, 0.0]]


@pytest.mark.parametrize("name", ["clipped", "dual", "cispo"])
def test_a_sum_over_tokens_of_scaled_advantages_is_the_weighted_loss(name: str) -> None:
    """Of losses that are homogeneous in the advantage; with KL added it is not."""
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    advantages, weights = torch.randn(4, generator=generator).double(), torch.rand(4, generator=generator).double()
    mask = torch.randint(0, 2, (4, 5), generator=generator)

    def loss(token_advantages: torch.Tensor) -> torch.Tensor:
        if name == "cispo":
            return cispo_loss(new, old, token_advantages, mask, clip=(0.2, 0.2))[0]
        return clipped_loss(new, old, token_advantages, mask, dual_clip=1.5 if name == "dual" else None)[0]

    scaled = loss(scale_advantages(advantages, mask, weights)).sum()
    weighted = reduce_token_losses(loss(advantages[:, None]), weights, mask)
    torch.testing.assert_close(scaled, weighted, rtol=1e-12, atol=1e-12)


def test_scaled_advantages_need_one_weight_per_row() -> None:
    with pytest.raises(SampleError, match=r"weights\n.*shape \[3\] .*with advantages .* of shape \[2\]"):
        scale_advantages(torch.ones(2), torch.ones(2, 4), torch.ones(3))
    with pytest.raises(SampleError, match=r"shape \[2, 4\]"):
        scale_advantages(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2))


@pytest.mark.parametrize(
    ("ends", "tokens"), [([0, 2000, 10], 10), ([0, 5, 2], 2), ([0, 2, 5], 4), ([0, 2, 5], 6), ([1, 2], 2), ([], 0)]
)
def test_ends_that_do_not_fit_the_tokens_are_refused(ends: list[int], tokens: int) -> None:
    with pytest.raises(SampleError, match=rf"cu_seqlens\n.*for {tokens} tokens\n.*rising from 0 to {tokens}"):
        row_of_tokens(torch.tensor(ends, dtype=torch.int32), tokens)


def test_rows_without_a_token_and_no_rows_at_all() -> None:
    assert row_of_tokens(torch.tensor([0, 0, 1, 1, 3, 3], dtype=torch.int32), 3).tolist() == [1, 3, 3]
    assert row_of_tokens(torch.tensor([0]), 0).tolist() == []


@pytest.mark.parametrize("shape", [(3, 1), (3, 2), ()])
def test_weights_that_are_not_one_per_row_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SampleError, match="row values"):
        reduce_token_losses(torch.ones(3, 2), torch.ones(shape), torch.ones(3, 2))


@pytest.mark.parametrize("rows", [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([True, False, True])])
def test_a_row_index_of_another_type_is_refused(rows: torch.Tensor) -> None:
    with pytest.raises(SampleError, match="row index"):
        reduce_token_losses(torch.ones(3), torch.ones(2), torch.ones(3), rows=rows)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_small_weights_survive_advantages_of_a_coarse_type(dtype: torch.dtype) -> None:
    scaled = scale_advantages(torch.tensor([1, -1], dtype=dtype), torch.ones(2, 1), torch.tensor([2e-8, 0.25]))
    assert isinstance(scaled, torch.Tensor)
    assert scaled.dtype == torch.float32
    assert scaled.flatten().tolist() == pytest.approx([2e-8, -0.25], rel=1e-6)
