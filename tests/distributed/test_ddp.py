"""Two real processes: the gradient under DDP is that of a single process, wherever the rows are."""

import multiprocessing
import os
import queue
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from miles_norm import LossConfig, loss_weights, normalize_rewards
from miles_norm.loss import clipped_loss, loss_factor, reduce_token_losses, row_of_tokens

SECONDS = 120
VOCABULARY = 11

# Four rollouts on seven rows of one to six tokens; siblings are not adjacent, one row is masked as a whole.
ROWS = [
    {"group_index": group, "rollout_id": rollout, "reward": reward, "loss_mask": mask}
    for group, rollout, reward, mask in (
        (0, 0, 1.0, [1, 1, 0, 1]),
        (0, 1, 0.0, [1]),
        (0, 0, 1.0, [0, 1]),
        (1, 2, 0.5, [1, 1, 1, 1, 1, 1]),
        (1, 3, 0.0, [0, 0]),
        (0, 1, 0.0, [1, 1, 1]),
        (1, 2, 0.5, [1, 0, 0]),
    )
]
# Rows of each micro-batch of each rank. Siblings are on different ranks and in different micro-batches.
SPREADS: dict[str, list[list[list[int]]]] = {
    "siblings apart": [[[0, 5], [3]], [[1, 2], [4, 6]]],
    "unequal numbers": [[[0], [1], [2, 3]], [[4, 5, 6]]],
    "a rank without a row": [[[0, 1], [2, 3, 4, 5, 6]], []],
}
AGGREGATIONS = ["rollout_mean", "token_mean"]


class Policy(torch.nn.Module):
    """Log-probs of the next token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.head = torch.nn.Linear(5, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        log_probs = self.head(self.embedding(tokens[:, 0]).tanh()).log_softmax(dim=-1)
        return log_probs.gather(1, tokens[:, 1:])[:, 0]


def tokens_of(row: int) -> Tensor:
    """Token before and token sampled, for each token of the row."""
    positions = torch.arange(len(ROWS[row]["loss_mask"]))
    return torch.stack([(positions * 3 + row) % VOCABULARY, (positions * 5 + 2 * row + 1) % VOCABULARY], dim=1)


def loss_of(model: torch.nn.Module, rows: list[int], aggregation: Any) -> Tensor:
    result = normalize_rewards(ROWS)
    weights = loss_weights(result, LossConfig(aggregation=aggregation))
    tokens = torch.cat([tokens_of(row) for row in rows]) if rows else torch.zeros(0, 2, dtype=torch.int64)
    mask = torch.tensor([m for row in rows for m in ROWS[row]["loss_mask"]], dtype=torch.int64)
    ends = torch.tensor([0, *(len(ROWS[row]["loss_mask"]) for row in rows)]).cumsum(0)
    row_of = row_of_tokens(ends, len(mask))
    log_probs = model(tokens)
    old = log_probs.detach() - 0.05 * torch.cos(tokens.sum(dim=1).double())
    losses, _ = clipped_loss(log_probs, old, result.advantages[rows].double()[row_of], mask, clip=(0.03, 0.03))
    return reduce_token_losses(losses, weights[rows], mask, rows=row_of)


def gradients(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]  # type: ignore[union-attr]


def train(rank: int, port: int, results: Any) -> None:
    """What one rank does, for every spread and aggregation."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    found = {}
    factor = loss_factor("ddp", data_parallel=dist.get_world_size())
    for name, spread in SPREADS.items():
        # Every rank runs as many backwards as the one with the most micro-batches.
        backwards = max(map(len, spread))
        batches = spread[rank] + [[]] * (backwards - len(spread[rank]))
        for aggregation in AGGREGATIONS:
            model = DistributedDataParallel(Policy())
            total = 0.0
            for number, rows in enumerate(batches):
                with model.no_sync() if number < backwards - 1 else nullcontext():
                    loss = loss_of(model, rows, aggregation)
                    (factor * loss).backward()
                total += loss.item()
            found[name, aggregation] = total, gradients(model)
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module", name="ranks")
def fixture_ranks() -> dict[int, Any]:
    """What both ranks found, by spread and aggregation."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [context.Process(target=train, args=(rank, store.port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=SECONDS) for _ in processes)
    except queue.Empty:
        pytest.fail(f"no result within {SECONDS} s; exit codes {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", SPREADS)
def test_gradient_is_that_of_a_single_process(ranks: dict[int, Any], name: str, aggregation: str) -> None:
    model = Policy()
    loss = loss_of(model, list(range(len(ROWS))), aggregation)
    loss.backward()
    (first, ours), (second, others) = ranks[0][name, aggregation], ranks[1][name, aggregation]
    # Loss sums of the ranks add up; their gradients were averaged, so that both hold the same.
    assert first + second == pytest.approx(loss.item(), rel=1e-12)
    assert ours == others
    for mine, expected in zip(ours, gradients(model), strict=True):
        assert max(map(abs, expected)) > 1e-3
        assert mine == pytest.approx(expected, rel=1e-10, abs=1e-12)
