"""Values that no trainable token can have: named on the CPU, NaN on a device. Masked entries may be anything."""

import math
from collections.abc import Callable
from typing import Any

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
    reduce_token_losses,
    row_sequences,
    scale_advantages,
    sequence_log_ratio,
    truncated_importance_sampling,
)

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
UNUSABLE = [math.nan, math.inf, -math.inf]
PLAIN = ("log_probs", "old_log_probs", "advantages")


def gspo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    return gspo_loss(log_probs, old_log_probs, advantages, mask, row_sequences(mask), clip=(0.2, 0.2))


def gspo_with_the_ratio_given(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    rows = row_sequences(mask)
    given = Sequences(rows.index, rows.tokens, torch.zeros(len(mask)))
    return gspo_loss(log_probs, old_log_probs, advantages, mask, given)


# Every loss and the names of the tensors that it takes before the mask.
LOSSES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "clipped": (clipped_loss, PLAIN),
    "dual": (lambda *tensors: clipped_loss(*tensors, dual_clip=3.0), PLAIN),
    "cispo": (lambda *tensors: cispo_loss(*tensors, clip=(0.2, 0.2)), PLAIN),
    "gspo": (gspo, PLAIN),
    "gspo given": (gspo_with_the_ratio_given, PLAIN),
    **{
        kind: (lambda *tensors, kind=kind: kl_loss(*tensors, kind=kind), ("log_probs", "reference_log_probs"))
        for kind in ("k1", "k2", "k3")
    },
    "importance": (truncated_importance_sampling, ("token_losses", "old_log_probs", "rollout_log_probs")),
}
EACH = [(loss, name) for loss, (_, names) in LOSSES.items() for name in names]
# Row 0 has tokens 0 and 1, row 1 token 2, row 2 none.
MASK = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]])


def inputs(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Log-probs a little apart, and a gradient for the first of them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: -torch.rand(3, 3, generator=generator) for name in names}
    tensors[names[0]].requires_grad_()
    return tensors


def spoiled(tensor: Tensor, value: float, *places: tuple[int, int]) -> Tensor:
    changed = tensor.detach().clone()
    for place in places:
        changed[place] = value
    return changed.requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("value", UNUSABLE)
@pytest.mark.parametrize(("loss", "name"), EACH)
def test_on_the_cpu_every_row_is_named(loss: str, name: str, value: float) -> None:
    function, names = LOSSES[loss]
    given = inputs(names)
    given[name] = spoiled(given[name], value, (0, 1), (1, 2), (2, 0))
    expected = rf"{name} of rows 0, 1\n.*{name} {value:g} at row 0, token 1; {name} {value:g} at row 1, token 2\n"
    with pytest.raises(SampleError, match=expected) as raised:
        function(*given.values(), MASK)
    assert raised.value.rows == (0, 1)


@pytest.mark.parametrize("value", UNUSABLE)
@pytest.mark.parametrize(("loss", "name"), EACH)
def test_masked_they_change_nothing(loss: str, name: str, value: float) -> None:
    function, names = LOSSES[loss]
    given = inputs(names)
    losses, metrics = function(*given.values(), MASK)
    given[name] = spoiled(given[name], value, (0, 2), (1, 0), (2, 0))
    again, again_metrics = function(*given.values(), MASK)
    assert torch.equal(losses, again)
    assert {key: float(metric) for key, metric in metrics.items()} == {k: float(m) for k, m in again_metrics.items()}
    again.sum().backward()
    gradient = given[names[0]].grad
    assert gradient is not None
    assert torch.equal(gradient[MASK == 0], torch.zeros(6))
    assert torch.isfinite(gradient).all()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("value", UNUSABLE)
@pytest.mark.parametrize(("loss", "name"), EACH)
def test_on_a_device_the_token_is_nan_and_so_is_its_gradient(loss: str, name: str, value: float) -> None:
    """In no function does a cut, a clip or a comparison make a number of it. Other rows keep every bit."""
    function, names = LOSSES[loss]
    given = inputs(names)
    good, good_metrics = function(*given.values(), MASK)
    given[name] = spoiled(given[name], value, (0, 1))
    losses, metrics = function(*given.values(), MASK)
    assert torch.isnan(losses[0, 1])
    assert torch.equal(losses[1:], good[1:])
    assert losses[0, 2] == 0
    losses.sum().backward()
    gradient = given[names[0]].grad
    assert gradient is not None
    assert torch.isnan(gradient[0, 1])
    assert torch.isfinite(gradient[1:]).all()
    assert gradient[0, 2] == 0
    # Metrics are over the batch.
    spoilt = {key for key, metric in metrics.items() if math.isnan(metric)}
    assert spoilt >= {key for key in good_metrics if key.endswith(("_min", "_max", "kl"))}
    assert int(metrics["tokens"]) == 3


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("loss", LOSSES)
def test_on_a_device_good_values_give_the_bits_of_the_cpu(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, names = LOSSES[loss]
    there = inputs(names)
    losses, _ = function(*there.values(), MASK)
    losses.sum().backward()
    monkeypatch.undo()
    here = inputs(names)
    expected, _ = function(*here.values(), MASK)
    expected.sum().backward()
    assert torch.equal(losses, expected)
    gradients = there[names[0]].grad, here[names[0]].grad
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(*gradients)


@pytest.mark.parametrize("loss", LOSSES)
def test_minus_infinity_on_both_sides_is_no_ratio_of_one(loss: str) -> None:
    function, names = LOSSES[loss]
    given = {name: spoiled(tensor, -math.inf, (1, 2)) for name, tensor in inputs(names).items()}
    with pytest.raises(SampleError, match=" and ".join(names[:2])):
        function(*given.values(), MASK)


def test_packed_tokens_are_named_by_their_position() -> None:
    old, mask = torch.tensor([0.0, -math.inf, math.nan, math.nan]), torch.tensor([1, 1, 0, 1])
    zeros = torch.zeros(4)
    with pytest.raises(
        SampleError, match=r"old_log_probs of tokens 1, 3\n.*-inf at token 1; old_log_probs nan at token 3"
    ):
        clipped_loss(zeros, old, zeros, mask)


def test_many_of_them_are_counted() -> None:
    with pytest.raises(SampleError, match=r"rows 0, 1, .*, 19 and 10 more\n.*and 50 more\n") as raised:
        kl_loss(torch.full((30, 2), math.nan), torch.zeros(30, 2), torch.ones(30, 2))
    assert raised.value.rows == tuple(range(30))


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, math.nan])
def test_a_mask_of_other_numbers_is_refused(value: float) -> None:
    mask = torch.tensor([[1.0, 0.0], [value, 1.0]])
    x = torch.zeros(2, 2)
    with pytest.raises(SampleError, match=rf"mask of row 1\n.*mask {value:g} at row 1, token 0"):
        clipped_loss(x, x, x, mask)
    with pytest.raises(SampleError, match="mask of row 1"):
        reduce_token_losses(x, torch.ones(2), mask)
    with pytest.raises(SampleError, match="mask of row 1"):
        sequence_log_ratio(x, x, mask, row_sequences(mask))


@pytest.mark.usefixtures("as_on_a_device")
def test_on_a_device_a_mask_of_other_numbers_is_nan() -> None:
    x, mask = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    losses, _ = clipped_loss(x, x, torch.ones(2, 2), mask)
    assert torch.isnan(losses).tolist() == [[False, False], [True, False]]


@pytest.mark.usefixtures("as_on_a_device")
def test_on_a_device_a_part_of_a_ratio_that_is_nan_reaches_the_other_micro_batches() -> None:
    old = torch.tensor([[0.0, -math.inf]])
    new, mask, one = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0])
    parts = Sequences(one, torch.tensor([4]))
    ratio = sequence_log_ratio(new, old, mask, parts) + sequence_log_ratio(new, new, mask, parts)
    losses, _ = gspo_loss(new, new, torch.ones(1, 2), mask, Sequences(one, torch.tensor([4]), ratio))
    assert torch.isnan(losses).all()


def test_a_log_ratio_that_is_no_number_is_refused() -> None:
    x = torch.zeros(2, 2)
    ratio = torch.tensor([0.0, math.nan])
    sequences = Sequences(torch.tensor([0, 1]), torch.tensor([2, 2]), ratio)
    with pytest.raises(SampleError, match=r"log_ratio of row 1\n"):
        gspo_loss(x, x, x, torch.ones(2, 2), sequences)
    # Of a sequence that trains nothing here it may be anything.
    gspo_loss(x, x, x, torch.tensor([[1, 1], [0, 0]]), sequences)


UNUSABLE_WEIGHTS = [*UNUSABLE, -0.5]


@pytest.mark.parametrize("value", UNUSABLE_WEIGHTS)
@pytest.mark.parametrize("packed", [False, True])
def test_weights_of_masked_rows_may_be_anything(value: float, packed: bool) -> None:
    # 0.25 (1 + 2) = 0.75, and row 1 is masked: losses 4 and 9 count for nothing.
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
    weights = torch.tensor([0.25, value], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1]) if packed else None
    if packed:
        losses, mask = losses.flatten(), mask.flatten()
    losses.requires_grad_()
    loss = reduce_token_losses(losses, weights, mask, rows=rows)
    loss.backward()
    assert loss.item() == 0.75
    assert losses.grad is not None
    assert losses.grad.flatten().tolist() == [0.25, 0.25, 0.0, 0.0]
    assert weights.grad is not None
    assert weights.grad.tolist() == [3.0, 0.0]


@pytest.mark.parametrize("value", UNUSABLE_WEIGHTS)
def test_weights_of_trained_rows_are_named(value: float) -> None:
    losses, mask = torch.ones(3, 2), torch.tensor([[1, 1], [0, 1], [0, 0]])
    weights = torch.tensor([0.25, value, value])
    with pytest.raises(SampleError, match=rf"weights of row 1\n.*weights {value:g} at row 1, token 1\n") as raised:
        reduce_token_losses(losses, weights, mask)
    assert raised.value.rows == (1,)
    with pytest.raises(SampleError, match=rf"weights of token 2\n.*weights {value:g} at token 2\n"):
        reduce_token_losses(torch.ones(4), weights, torch.tensor([1, 1, 1, 0]), rows=torch.tensor([0, 0, 1, 2]))


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("value", UNUSABLE_WEIGHTS)
def test_on_a_device_a_weight_of_a_trained_row_makes_the_loss_nan(value: float) -> None:
    losses, mask = torch.ones(3, 2), torch.tensor([[1, 1], [0, 1], [0, 0]])
    assert math.isnan(reduce_token_losses(losses, torch.tensor([0.25, value, 1.0]), mask))
    assert reduce_token_losses(losses, torch.tensor([0.25, 0.5, value]), mask).item() == 1.0


@pytest.mark.parametrize("value", UNUSABLE)
@pytest.mark.parametrize("ragged", [False, True])
def test_advantages_and_weights_of_masked_rows_may_be_anything(value: float, ragged: bool) -> None:
    mask: Any = [[1, 1], [0, 0]] if ragged else torch.tensor([[1, 1], [0, 0]])
    for advantages, weights in (
        ([2.0, value], [0.25, 0.5]),
        ([2.0, 1.0], [0.25, value]),
        ([2.0, value], [0.25, value]),
    ):
        pair = torch.tensor(advantages, requires_grad=True), torch.tensor(weights, requires_grad=True)
        scaled = scale_advantages(pair[0], mask, pair[1])
        assert [row.tolist() for row in scaled] == [[0.5, 0.5], [0.0, 0.0]]
        sum(row.sum() for row in scaled).backward()  # type: ignore[union-attr]
        gradients = [tensor.grad.tolist() for tensor in pair if tensor.grad is not None]
        assert gradients == [[0.5, 0.0], [4.0, 0.0]]


@pytest.mark.parametrize(
    ("advantages", "weights", "text"),
    [
        ([1.0, math.nan, 1.0], [1.0, 0.5, math.nan], "row 1: advantage nan, weight 0.5"),
        ([1.0, 2.0, 1.0], [1.0, math.inf, -1.0], "row 1: advantage 2, weight inf"),
        ([1.0, 2.0, 1.0], [1.0, -0.5, 1.0], "row 1: advantage 2, weight -0.5"),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_advantages_and_weights_of_trained_rows_are_named(
    advantages: list[float], weights: list[float], text: str, ragged: bool
) -> None:
    mask: Any = [[1, 1], [0, 1], [0, 0]]
    with pytest.raises(SampleError, match=rf"advantages and weights of row 1\n.*{text}\n") as raised:
        scale_advantages(torch.tensor(advantages), mask if ragged else torch.tensor(mask), torch.tensor(weights))
    assert raised.value.rows == (1,)


def test_a_clean_batch_is_computed_as_if_nothing_was_checked() -> None:
    """The clipped loss, its sum and both gradients, bit by bit, without a look at any value."""
    given, weights = inputs(PLAIN), torch.tensor([0.25, 0.5, 0.0], dtype=torch.float64)
    losses, _ = clipped_loss(*given.values(), MASK)
    loss = reduce_token_losses(losses, weights, MASK)
    loss.backward()
    plain = inputs(PLAIN)
    new, old, advantages = (torch.where(MASK != 0, tensor, 0.0) for tensor in plain.values())
    ratio = (new - old).exp()
    expected = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    weighted = (weights.float()[:, None] * expected).sum()
    weighted.backward()
    assert torch.equal(losses, expected)
    assert loss.item() == weighted.item()
    gradients = given["log_probs"].grad, plain["log_probs"].grad
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(*gradients)


def test_values_that_are_large_but_finite_are_good() -> None:
    """Their sum is not finite, which is no reason: 0.1 (3e38 + 3e38) = 6e37."""
    losses, weights = torch.full((1, 2), 3e38), torch.tensor([0.1])
    assert reduce_token_losses(losses, weights, torch.ones(1, 2)).item() == pytest.approx(6e37, rel=1e-6)
    assert torch.isfinite(clipped_loss(-losses, losses, losses, torch.ones(1, 2))[0]).all()


def test_functional_gradients() -> None:
    given = inputs(PLAIN)

    def loss(log_probs: Tensor) -> Tensor:
        losses, _ = clipped_loss(log_probs, given["old_log_probs"], given["advantages"], MASK)
        return reduce_token_losses(losses, torch.ones(3), MASK)

    loss(given["log_probs"]).backward()
    assert given["log_probs"].grad is not None
    assert torch.equal(torch.func.grad(loss)(given["log_probs"].detach()), given["log_probs"].grad)


def test_a_compiled_graph_looks_at_no_value() -> None:
    """It has no break, and is NaN where a device would be."""
    given = inputs(PLAIN)

    @torch.compile(backend="eager", fullgraph=True)
    def loss(log_probs: Tensor) -> Tensor:
        losses, _ = clipped_loss(log_probs, given["old_log_probs"], given["advantages"], MASK)
        return reduce_token_losses(losses, torch.ones(3), MASK)

    good = given["log_probs"].detach()
    expected, _ = clipped_loss(good, given["old_log_probs"], given["advantages"], MASK)
    assert loss(good).item() == pytest.approx(expected.sum().item(), rel=1e-6)
    assert math.isnan(loss(spoiled(good, -math.inf, (0, 1))).item())
