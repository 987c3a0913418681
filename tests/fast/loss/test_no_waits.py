"""The host never waits for the device: no number is read, and no shape depends on values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles_norm import LossConfig, RolloutColumns, loss_weights, normalize_columns
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


class NoWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal"), name
        # A boolean mask as an index has as many results as it has ones.
        if name in ("index", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


def test_waits_are_seen() -> None:
    for wait in (lambda x: x.sum().item(), lambda x: x[x > 0], torch.nonzero, torch.unique):
        with pytest.raises(AssertionError), NoWaits():
            wait(torch.ones(3))


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": "token_mean"},
        {"aggregation": "sample_mean"},
        {"aggregation": "rollout_mean"},
        {"divisor": "trained_rows"},
        {"divisor": "nominal_rollouts", "nominal_rollouts": 4},
        {"aggregation": "rollout_row_mean"},
        {"aggregation": "prompt_mean"},
        {"aggregation": "constant", "max_tokens": 9},
    ],
    ids=lambda settings: settings.get("aggregation", settings.get("divisor")),
)
def test_weights(settings: dict[str, Any]) -> None:
    columns = RolloutColumns(
        group=torch.tensor([0, 0, 1]),
        rollout=torch.tensor([0, 0, 1]),
        reward=torch.tensor([1.0, 1.0, 0.0]),
        trainable_tokens=torch.tensor([2, 3, 4]),
        padding=torch.tensor([False, False, True]),
    )
    result = normalize_columns(columns)
    for count_empty in (False, True):
        config = LossConfig(count_empty_rollouts=count_empty, count_empty_rows=count_empty, **settings)
        with NoWaits():
            loss_weights(result, config)


# Tensors without values: whoever reads one fails, as on a device whoever reads one waits.
ON = {"device": "meta"}
X, MASK, WEIGHTS = torch.randn(2, 3, **ON), torch.ones(2, 3, dtype=torch.int64, **ON), torch.rand(2, **ON)
WHOLE = Sequences(torch.tensor([0, 0], **ON), torch.tensor([5], **ON), torch.tensor([0.1], **ON))


def packed_rows() -> torch.Tensor:
    return row_of_tokens(torch.tensor([0, 1, 3], **ON), 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: clipped_loss(X, X, X, MASK, dual_clip=3.0),
        lambda: cispo_loss(X, X, X, MASK, clip=(0.2, 0.2)),
        lambda: kl_loss(X, X, MASK),
        lambda: truncated_importance_sampling(X, X, X, MASK),
        lambda: gspo_loss(X, X, X, MASK, row_sequences(MASK)),
        lambda: gspo_loss(X, X, X, MASK, WHOLE),
        lambda: gspo_loss(X[0], X[0], X[0], MASK[0], row_sequences(MASK[0], packed_rows(), num_rows=2)),
        lambda: sequence_log_ratio(X, X, MASK, WHOLE),
        lambda: reduce_token_losses(X, WEIGHTS, MASK),
        lambda: reduce_token_losses(X[0], WEIGHTS, MASK[0], rows=packed_rows()),
    ],
)
def test_losses(call: Callable[[], object]) -> None:
    with NoWaits():
        call()


def test_backward() -> None:
    log_probs = torch.randn(2, 3, requires_grad=True, **ON)
    with NoWaits():
        losses, _ = clipped_loss(log_probs, X, X, MASK, dual_clip=3.0)
        reduce_token_losses(losses, WEIGHTS, MASK).backward()
    assert log_probs.grad is not None


@pytest.mark.usefixtures("as_on_a_device")
def test_sequences_of_a_result() -> None:
    """A result has values, so here the checks are told that it is elsewhere."""
    rows = torch.tensor([0, 1, 1])
    columns = RolloutColumns(group=[0] * 2, rollout=[0, 1], reward=[1.0, 0.0], trainable_tokens=[2, 1])
    result = normalize_columns(columns)
    with NoWaits():
        sequences = rollout_sequences(result, torch.tensor([1, 0]), rows=rows, kept=torch.tensor([True, False]))
    assert (sequences.index.tolist(), sequences.tokens.tolist()) == ([1, 0, 0], [2, 0])


def test_whoever_reads_a_tensor_without_values_fails() -> None:
    for read in (torch.Tensor.tolist, torch.nonzero, lambda x: bool(x.any()), lambda x: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(X)
