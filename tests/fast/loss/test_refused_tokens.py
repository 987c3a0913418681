"""Tensors of tokens that are refused: other types, shapes, dtypes and devices; and those that are as good as any."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_norm.errors import SampleError
from miles_norm.loss import (
    Sequences,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    mask_loss_weights,
    reduce_token_losses,
    row_sequences,
    scale_advantages,
    sequence_log_ratio,
    truncated_importance_sampling,
)

X, MASK = torch.full((2, 3), -0.5), torch.tensor([[1, 1, 0], [1, 0, 0]])
ROWS = row_sequences(MASK)


LOSSES: dict[str, Callable[..., Any]] = {
    "clipped": lambda x, mask: clipped_loss(x, x, x, mask),
    "cispo": lambda x, mask: cispo_loss(x, x, x, mask, clip=(0.2, 0.2)),
    "gspo": lambda x, mask: gspo_loss(x, x, x, mask, ROWS),
    "kl": lambda x, mask: kl_loss(x, x, mask),
    "importance": lambda x, mask: truncated_importance_sampling(x, x, x, mask),
    "ratio": lambda x, mask: sequence_log_ratio(x, x, mask, ROWS),
    "reduce": lambda x, mask: reduce_token_losses(x, torch.ones(2), mask),
}


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (None, "a value of type NoneType"),
        ([[0.5] * 3] * 2, "a value of type list"),
        (np.zeros((2, 3)), "a value of type ndarray"),
        (torch.tensor(0.5), r"torch.float32 of shape \[\] on cpu"),
        (torch.zeros(2, 3, 4), r"torch.float32 of shape \[2, 3, 4\] on cpu"),
        (torch.zeros(2, 3, dtype=torch.int64), r"torch.int64 of shape \[2, 3\]"),  # token ids
        (torch.zeros(2, 3, dtype=torch.bool), "torch.bool"),
        (torch.zeros(2, 3, dtype=torch.complex64), "torch.complex64"),
        (torch.zeros(2, 3).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (torch.zeros(2, 3).to_sparse(), r"torch.float32 of shape \[2, 3\] on cpu, torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_are_none(loss: str, tokens: Any, got: str) -> None:
    name = "token_losses" if loss in ("importance", "reduce") else "log_probs"
    with pytest.raises(SampleError, match=rf"^{name}\n +got: +{got}(.*)\n +expected: floating-point numbers, padded"):
        LOSSES[loss](tokens, MASK)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_floating_point_type_is_computed_in_float32_at_least(loss: str, dtype: torch.dtype) -> None:
    found = LOSSES[loss](X.to(dtype), MASK)
    values = found[0] if isinstance(found, tuple) else found
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        values, (LOSSES[loss](X, MASK)[0] if isinstance(found, tuple) else LOSSES[loss](X, MASK)).to(values)
    )


@pytest.mark.parametrize(
    "mask", [None, [[1, 1, 0]] * 2, MASK[0], torch.ones(2, 3, dtype=torch.complex64), MASK.to("meta"), MASK.to_sparse()]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_masks_that_do_not_fit(loss: str, mask: Any) -> None:
    with pytest.raises(SampleError, match=r"^mask\n +got: "):
        LOSSES[loss](X, mask)


@pytest.mark.parametrize("mask", [MASK.bool(), MASK.float(), MASK.to(torch.uint8), MASK.to(torch.bfloat16)])
@pytest.mark.parametrize("loss", LOSSES)
def test_masks_of_every_dtype(loss: str, mask: Tensor) -> None:
    found, expected = LOSSES[loss](X, mask), LOSSES[loss](X, MASK)
    if isinstance(found, tuple):
        found, expected = found[0], expected[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda bad: clipped_loss(X, bad, X, MASK), "old_log_probs"),
        (lambda bad: kl_loss(X, bad, MASK), "reference_log_probs"),
        (lambda bad: truncated_importance_sampling(X, X, bad, MASK), "rollout_log_probs"),
        (lambda bad: sequence_log_ratio(X, bad, MASK, ROWS), "old_log_probs"),
    ],
)
@pytest.mark.parametrize("bad", [None, [0.5], X[:, :1], X.to(torch.int64), X.bool(), X.to("meta")])
def test_other_log_probs_that_do_not_fit(call: Callable[[Any], object], name: str, bad: Any) -> None:
    with pytest.raises(
        SampleError, match=rf"^{name}\n.*\n +expected: floating-point numbers on cpu with the shape of "
    ):
        call(bad)


@pytest.mark.parametrize("bad", [None, 1.0, X[0], X[:, :2], X.bool(), X.to(torch.complex64)])
def test_advantages_that_do_not_fit(bad: Any) -> None:
    with pytest.raises(SampleError, match=r"^advantages\n.*\n +expected: numbers on cpu with the shape of log_probs"):
        clipped_loss(X, X, bad, MASK)


def test_advantages_may_be_whole_numbers_and_one_for_a_row() -> None:
    whole = torch.tensor([[1], [-2]])
    expected, _ = clipped_loss(X, X, whole.float().expand(2, 3), MASK)
    assert torch.equal(clipped_loss(X, X, whole, MASK)[0], expected)


@pytest.mark.parametrize("bad", [None, 1.0, [0.5, 0.5], torch.ones(3), torch.ones(2, 1), torch.tensor(1.0)])
def test_weights_that_are_not_one_for_each_row(bad: Any) -> None:
    with pytest.raises(SampleError, match=r"^row values\n"):
        reduce_token_losses(X, bad, MASK)


def test_weights_that_are_flags_are_refused() -> None:
    with pytest.raises(SampleError, match=r"^weights\n +got: +torch.bool"):
        reduce_token_losses(X, torch.tensor([True, False]), MASK)
    with pytest.raises(SampleError, match=r"^weights\n +got: +torch.bool"):
        scale_advantages(torch.ones(2), MASK, torch.tensor([True, False]))


def test_a_product_beyond_the_dtype_names_its_row() -> None:
    with pytest.raises(SampleError, match=r"advantages and weights of row 0\n"):
        scale_advantages(torch.tensor([3e38, 1.0]), torch.ones(2, 1), torch.tensor([1e5, 1.0]))


def test_sequences_with_more_tokens_here_than_in_all_are_named() -> None:
    sequences = Sequences(torch.tensor([0, 1]), torch.tensor([1, 3]))
    with pytest.raises(SampleError, match=r"tokens of sequence 0\n.*1 in all, 3 of them here"):
        sequence_log_ratio(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), sequences)


def test_wide_unsigned_numbers_are_refused_wherever_they_would_be_calculated_with() -> None:
    two, ones = torch.tensor([1, 1], dtype=torch.uint16), torch.ones(2, 3)
    index, tokens = torch.tensor([0, 1]), torch.tensor([3, 3])
    for call in (
        lambda: scale_advantages(two, ones, torch.ones(2)),
        lambda: scale_advantages(torch.ones(2), ones, two),
        lambda: sequence_log_ratio(-ones, -ones, ones, Sequences(index, two)),
        lambda: gspo_loss(-ones, -ones, ones, ones, Sequences(index, tokens, two)),
    ):
        with pytest.raises(SampleError, match=r"torch\.uint16"):
            call()


def test_masks_without_values_are_refused() -> None:
    with pytest.raises(SampleError, match=r"loss masks\n.*on meta"):
        mask_loss_weights(torch.ones(2, 3, device="meta"), [0, 1])
