"""On a device: the host never waits for weights and losses, launches are bounded, and the values are the CPU's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_checks import STRICT, columns, on
from pretended_device import off_device, on_device, watched, without_waits
from torch import Tensor
from torch.utils._pytree import tree_flatten

from miles_norm import LossConfig, NormalizationConfig, RolloutColumns, loss_weights, normalize_columns
from miles_norm.loss import (
    Sequences,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    reduce_token_losses,
    rollout_sequences,
    row_of_tokens,
    row_sequences,
    sequence_log_ratio,
    truncated_importance_sampling,
)


@pytest.fixture(autouse=True)
def fixture_device() -> Iterator[Any]:
    """Factories such as ``torch.zeros(..., device=...)`` know the pretended device."""
    with watched() as seen:
        yield seen


WEIGHTS = [
    {"aggregation": "token_mean"},
    {"aggregation": "sample_mean"},
    {"aggregation": "rollout_mean"},
    {"divisor": "trained_rows"},
    {"divisor": "nominal_rollouts", "nominal_rollouts": 4},
    {"aggregation": "rollout_row_mean"},
    {"aggregation": "prompt_mean"},
    {"aggregation": "constant", "max_tokens": 9},
]


@pytest.mark.parametrize("chosen", WEIGHTS, ids=lambda chosen: "-".join(map(str, chosen.values())))
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("count_empty", [False, True])
def test_weights(chosen: dict[str, Any], states: bool, count_empty: bool) -> None:
    given = columns(60, 3, shuffled=True, states=states)
    given.pop("adapter", None)  # scopes of adapters are numbered by their values
    config = NormalizationConfig(**STRICT if states else {})
    there, cpu = normalize_columns(on(on_device, given), config), normalize_columns(RolloutColumns(**given), config)
    loss = LossConfig(count_empty_rollouts=count_empty, count_empty_rows=count_empty, **chosen)
    without_waits(lambda: loss_weights(there, loss), 30)
    assert torch.equal(off_device(loss_weights(there, loss)), loss_weights(cpu, loss))


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
MASK, ENDS = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([0, 1, 3])
# Both rows in one sequence of five tokens, of which two are in another micro-batch.
WHOLE = (torch.tensor([0, 0]), torch.tensor([5]), torch.tensor([0.1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, mask, ends, whole: clipped_loss(x, x, x, mask, dual_clip=3.0),
        lambda x, mask, ends, whole: cispo_loss(x, x, x, mask, clip=(0.2, 0.2)),
        lambda x, mask, ends, whole: kl_loss(x, x, mask),
        lambda x, mask, ends, whole: truncated_importance_sampling(x, x, x, mask),
        lambda x, mask, ends, whole: gspo_loss(x, x, x, mask, row_sequences(mask)),
        lambda x, mask, ends, whole: gspo_loss(x, x, x, mask, whole),
        lambda x, mask, ends, whole: gspo_loss(
            x[0], x[0], x[0], mask[0], row_sequences(mask[0], row_of_tokens(ends, 3), num_rows=2)
        ),
        lambda x, mask, ends, whole: sequence_log_ratio(x, x, mask, whole),
        lambda x, mask, ends, whole: reduce_token_losses(x, x[:, 0], mask),
        lambda x, mask, ends, whole: reduce_token_losses(x[0], x[:, 0], mask[0], rows=row_of_tokens(ends, 3)),
    ],
)
def test_losses(call: Callable[..., Any]) -> None:
    x, mask, ends = on_device(X), on_device(MASK), on_device(ENDS)
    whole = Sequences(*map(on_device, WHOLE))
    without_waits(lambda: call(x, mask, ends, whole), 100)
    found, expected = (
        tree_flatten(value)[0]
        for value in (off_device(call(x, mask, ends, whole)), call(X, MASK, ENDS, Sequences(*WHOLE)))
    )
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_backward() -> None:
    def gradient(put: Callable[[Tensor], Tensor]) -> Tensor:
        x, mask = put(X), put(MASK)
        log_probs = put(X).requires_grad_()
        losses, _ = clipped_loss(log_probs, x, x, mask, dual_clip=3.0)
        reduce_token_losses(losses, x[:, 0], mask).backward()
        assert log_probs.grad is not None
        return log_probs.grad

    without_waits(lambda: gradient(on_device), 200)
    assert torch.equal(off_device(gradient(on_device)), gradient(lambda x: x.clone()))


def test_sequences_of_a_result() -> None:
    given = {"group": [0] * 2, "rollout": [0, 1], "reward": [1.0, 0.0], "trainable_tokens": [2, 1]}
    result = normalize_columns(RolloutColumns(**{name: on_device(torch.tensor(v)) for name, v in given.items()}))
    rows, batch, kept = (on_device(torch.tensor(v)) for v in ([0, 1, 1], [1, 0], [True, False]))
    without_waits(lambda: rollout_sequences(result, batch, rows=rows, kept=kept), 20)
    sequences = off_device(rollout_sequences(result, batch, rows=rows, kept=kept).index)
    assert sequences.tolist() == [1, 0, 0]
    assert off_device(rollout_sequences(result, batch, rows=rows, kept=kept).tokens).tolist() == [2, 0]
