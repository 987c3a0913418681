"""Two real processes that share the rows of groups and rollouts: the bits of one process, and its errors."""

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import estimator_problems, new_row, problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_norm import (
    MilesNormError,
    NormalizationConfig,
    RolloutColumns,
    loss_weights,
    normalize_columns,
    normalize_distributed,
)
from miles_norm.columns import columns_from_samples
from miles_norm.errors import ConfigError, SampleError

SECONDS = 120
Found = tuple[Any, ...]


def found_by(result: Any, rows: slice) -> Found:
    """Bits of this rank's rows, and what it knows of the whole."""
    return (
        result.advantages[rows].view(torch.int32).tolist(),
        loss_weights(result)[rows].view(torch.int64).tolist(),
        result.groups,
        result.index.rollout_ids,
        [text for text in result.warnings if "count as one rollout" not in text],
    )


def serve(rank: int, port: int, requests: Any, answers: Any) -> None:
    """Answer requests until None comes: columns and settings of this rank in, what it found or the error out."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    while (request := requests.get()) is not None:
        columns, config = pickle.loads(request)
        try:
            found = normalize_distributed(columns, config)
            answers.put(found_by(found.result, found.rows))
        except MilesNormError as error:
            answers.put((type(error), str(error), error.rows))
    dist.destroy_process_group()


class Ranks:
    """Two processes that answer together."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.requests, self.answers = ([context.Queue() for _ in range(2)] for _ in range(2))
        self.processes = [
            context.Process(target=serve, args=(n, self.store.port, self.requests[n], self.answers[n]), daemon=True)
            for n in range(2)
        ]
        for process in self.processes:
            process.start()

    def ask(self, *given: tuple[RolloutColumns | None, NormalizationConfig]) -> list[Found]:
        for requests, one in zip(self.requests, given, strict=True):
            requests.put(pickle.dumps(one))
        return [answers.get(timeout=SECONDS) for answers in self.answers]

    def close(self) -> None:
        for requests in self.requests:
            requests.put(None)
        for process in self.processes:
            process.join(timeout=10)
            process.kill()


@pytest.fixture(scope="module", name="ranks")
def fixture_ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()


@settings(max_examples=60, deadline=None, derandomize="CI" in os.environ)
@given(problem=st.one_of(problems(), estimator_problems()), data=st.data())
def test_bits_of_one_process(ranks: Ranks, problem: Any, data: st.DataObject) -> None:
    batch, config = problem
    assume(batch.sizes is None)  # sizes are of rows in one place
    here = data.draw(st.integers(0, len(batch.samples)))
    try:
        parts = [
            columns_from_samples(rows, config) if rows else None
            for rows in (batch.samples[:here], batch.samples[here:])
        ]
        whole = columns_from_samples(batch.samples, config)
    except MilesNormError:
        assume(False)
    at = 0 if parts[0] is None else len(parts[0])
    expected = [answer(whole, config, rows) for rows in (slice(0, at), slice(at, len(whole)))]
    assert ranks.ask(*((part, config) for part in parts)) == expected


def answer(whole: RolloutColumns, config: NormalizationConfig, rows: slice) -> Found:
    """What a rank with these rows of the whole has to find."""
    try:
        return found_by(normalize_columns(whole, config), rows)
    except MilesNormError as error:
        return type(error), str(error), error.rows


def columns(rewards: list[float], **more: Any) -> RolloutColumns:
    rows = len(rewards)
    given = {"group": [0] * rows, "rollout": list(range(rows)), "trainable_tokens": [1] * rows}
    return RolloutColumns(reward=rewards, **given | more)


def test_by_hand(ranks: Ranks) -> None:
    # One group on two ranks: rewards 1, 0 | 0.5. Rollout 1 has a row on each, and speaks on the second, with 5 tokens.
    config = NormalizationConfig(advantage_estimator="dr_grpo")
    first = columns([1.0, 0.0], rollout=["a", "b"])
    second = columns([0.5, 0.5], rollout=["b", "c"], trainable_tokens=[5, 1])
    (one, *_), (other, *_) = ranks.ask((first, config), (second, config))
    # Rollout rewards 1, 0.5, 0.5 with mean 2/3.
    assert torch.tensor(one + other, dtype=torch.int32).view(torch.float32).tolist() == pytest.approx(
        [1 / 3, -1 / 6, -1 / 6, -1 / 6]
    )


def test_a_rank_without_rows(ranks: Ranks) -> None:
    config = NormalizationConfig()
    found = ranks.ask((None, config), (columns([1.0, 0.0]), config))
    expected = normalize_columns(columns([1.0, 0.0]))
    assert found == [found_by(expected, slice(0, 0)), found_by(expected, slice(0, 2))]
    kinds = [kind for kind, *_ in ranks.ask((None, config), (None, config))]
    assert kinds == [SampleError, SampleError]


def test_errors_are_raised_on_every_rank_and_name_rows_of_the_whole(ranks: Ranks) -> None:
    config = NormalizationConfig()
    found = ranks.ask((columns([1.0, 0.0]), config), (columns([1.0, float("nan")]), config))
    assert found[0] == found[1]
    assert found[0][1].startswith("reward of row 3")
    assert found[0][2] == (3,)


def test_settings_that_differ_are_refused(ranks: Ranks) -> None:
    given = [(columns([1.0]), NormalizationConfig(std_ddof=ddof)) for ddof in (1, 0)]
    for kind, text, _ in ranks.ask(*given):
        assert kind is ConfigError
        assert "rank 0: std_ddof=1, rank 1: std_ddof=0" in text


def test_what_is_no_config_and_no_columns_is_refused_on_every_rank(ranks: Ranks) -> None:
    """None of them waits for one that gave up."""
    config = NormalizationConfig()
    for kind, first, second in (
        (SampleError, ([{"reward": 1.0}], config), (columns([1.0]), config)),
        (ConfigError, (columns([1.0]), {"std_ddof": 0}), (None, config)),
    ):
        found = ranks.ask(first, second)
        assert [each[0] for each in found] == [kind, kind]
        assert all(each[1].startswith("rank 0: ") for each in found)


def test_one_process_is_a_group_too() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = normalize_distributed(columns_from_samples([new_row(index=0), new_row(index=1, reward=0.0)]))
        assert torch.equal(found.advantages, found.result.advantages)
        with pytest.raises(ConfigError, match="a group that this process is not in"):
            normalize_distributed(None, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    finally:
        dist.destroy_process_group()
