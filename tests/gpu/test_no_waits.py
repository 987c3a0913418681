"""On a real device torch itself says when the host would wait."""

from collections.abc import Callable, Iterator

import pytest
import torch
from device_checks import columns, on
from torch import Tensor

from miles_norm import LossConfig, TrainData, loss_weights, normalize_columns
from miles_norm.loss import clipped_loss, reduce_token_losses
from miles_norm.statistics import segment_statistics
from miles_norm.train_data import Ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(name="no_waits")
def fixture_no_waits() -> Iterator[Callable[[], None]]:
    """Called, it turns every wait into an error until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_waits_are_seen(no_waits: Callable[[], None]) -> None:
    x = torch.ones(3, device="cuda")
    no_waits()
    with pytest.raises(RuntimeError):
        x.sum().item()


def test_statistics_weights_losses_and_batches(no_waits: Callable[[], None]) -> None:
    result = normalize_columns(on(Tensor.cuda, columns(3_000, 1, shuffled=True, states=False)))
    values, count = torch.rand(4096, dtype=torch.float64, device="cuda"), torch.full((512,), 8, device="cuda")
    x, mask = torch.randn(8, 16, device="cuda"), torch.ones(8, 16, dtype=torch.int64, device="cuda")
    data = TrainData({
        "tokens": Ragged(torch.arange(12, device="cuda"), [0, 5, 12]),
        "response_lengths": torch.tensor([2, 4], device="cuda"),
        "loss_masks": Ragged(torch.ones(6, dtype=torch.uint8, device="cuda"), [0, 2, 6]),
        "rewards": torch.tensor([0.5, -0.5], device="cuda"),
    })  # fmt: skip
    no_waits()
    segment_statistics(values, count, longest=8)
    loss_weights(result, LossConfig())
    losses, _ = clipped_loss(x, x, x, mask)
    reduce_token_losses(losses, x[:, 0], mask)
    assert data.packed_batch()["advantages"].is_cuda
