"""A real Ray on one machine: bits and errors of one process, shards without a copy, streams, datasets."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import estimator_problems, problems
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from miles_norm import (
    MilesNormError,
    NormalizationConfig,
    StreamConfig,
    TrainData,
    UpdateConfig,
    normalize_columns,
    normalize_rewards,
    plan_updates,
    split_by_data_parallel,
)
from miles_norm.cluster import RolloutNormalizer, get_shard, normalize_batch, normalize_on_cluster
from miles_norm.columns import columns_from_samples
from miles_norm.conversion import train_data_from_result
from miles_norm.errors import ConfigError, GroupingError, RewardError, SampleError
from miles_norm.result import NormalizedRewards
from miles_norm.train_data import Ragged

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local")

# Workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def samples_of(rollouts: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rollouts of one to three rows, four to a group, with tokens as arrays."""
    rng = np.random.default_rng(seed)
    rows = []
    for rollout in range(rollouts):
        reward = float(rng.integers(0, 3)) / 2
        for _ in range(int(rng.integers(1, 4))):
            prompt, response = rng.integers(1, 9, 2)
            rows.append({
                "group_index": rollout // 4, "rollout_id": rollout, "index": len(rows), "reward": reward,
                "tokens": rng.integers(0, 100, prompt + response), "response_length": int(response),
                "loss_mask": rng.integers(0, 2, response).astype(np.uint8),
                "rollout_log_probs": rng.random(response).astype(np.float32),
            })  # fmt: skip
    return rows


def cut(rows: list[Any], ends: list[int]) -> list[list[Any]]:
    return [rows[start:stop] for start, stop in zip([0, *ends], [*ends, len(rows)], strict=True)]


def bits(result: NormalizedRewards) -> list[int]:
    return result.advantages.view(torch.int32).tolist()


def same(one: TrainData, other: TrainData) -> bool:
    def plain(column: Any) -> Any:
        if isinstance(column, Ragged):
            return column.values.dtype, column.tolists()
        return (column.dtype, column.tolist()) if isinstance(column, torch.Tensor) else column

    return {name: plain(one[name]) for name in one.columns} == {name: plain(other[name]) for name in other.columns}


@settings(max_examples=15, deadline=None, derandomize="CI" in os.environ, suppress_health_check=list(HealthCheck))
@given(problem=st.one_of(problems(), estimator_problems()), data=st.data())
def test_bits_and_errors_of_one_process(problem: Any, data: st.DataObject) -> None:
    batch, config = problem
    count = len(batch.samples)
    ends = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    parts = cut(batch.samples, ends)
    try:
        [columns_from_samples(part, config) for part in parts]
        whole = columns_from_samples(batch.samples, config)
    except MilesNormError:
        assume(False)
    try:
        expected: Any = bits(normalize_columns(whole, config, batch.sizes))
    except MilesNormError as error:
        expected = type(error), error.rows
    try:
        found: Any = bits(normalize_on_cluster([ray.put(part) for part in parts], config, batch.sizes).result)
    except MilesNormError as error:
        found = type(error), error.rows
    assert found == expected


def test_a_part_without_rows_changes_nothing() -> None:
    """All rollouts of a node may have been dropped."""
    rows = samples_of(12)
    one, *_, other = refs = [ray.put(part) for part in (rows[:7], [], [], rows[7:])]
    rewards, expected = normalize_on_cluster(refs), normalize_on_cluster([one, other])
    assert bits(rewards.result) == bits(expected.result)
    assert rewards.parts == (one, other)
    assert [len(data) for data in ray.get(rewards.train_data())] == [7, len(rows) - 7]
    found, wanted = ([get_shard(ref) for ref in each.shards(each.plan_shards(2))] for each in (rewards, expected))
    assert all(same(a.data, b.data) and a.ends == b.ends for a, b in zip(found, wanted, strict=True))
    with pytest.raises(SampleError, match="no rows in 2 parts"):
        normalize_on_cluster([refs[1], refs[2]])


def test_what_are_no_refs_and_no_tokens_is_refused() -> None:
    rows = samples_of(2)
    ref = ray.put(rows)
    refused = {"type NoneType": None, "type ObjectRef": ref, "no parts": [], "part 1 of type list": [ref, rows]}
    for got, parts in (refused | {"1 refs that are there twice": [ref, ref]}).items():
        with pytest.raises(SampleError, match=rf"parts on a cluster\n.*{got}"):
            normalize_on_cluster(parts)
    with pytest.raises(ConfigError, match="a NormalizationConfig"):
        normalize_on_cluster([ref], {"std_ddof": 0})  # type: ignore[arg-type]
    for tokens in (None, 5):
        rewards = normalize_on_cluster([ref, ray.put([{**rows[0], "tokens": tokens, "rollout_id": 9}])])
        with pytest.raises(SampleError, match="rows without tokens"):
            rewards.plan_shards(2)


def test_shards_are_those_of_one_process() -> None:
    rows = samples_of(40)
    config, updates = NormalizationConfig(), UpdateConfig(rollouts_per_update=16, max_tokens_per_gpu=64)
    result = normalize_rewards(rows, config)
    plan = plan_updates(result, updates)
    expected = split_by_data_parallel(train_data_from_result(rows, result, plan=plan), 3, plan)
    # Rollouts, and groups, are cut in two by the ends of parts.
    rewards = normalize_on_cluster([ray.put(part) for part in cut(rows, [13, 14, 50])], config)
    assert bits(rewards.result) == bits(result)
    refs = rewards.shards(rewards.plan_shards(3, plan_updates(rewards.result, updates)))
    for ref, shard in zip(refs, expected, strict=True):
        found = get_shard(ref)
        assert (found.rank, found.rows.tolist(), found.ends) == (shard.rank, shard.rows.tolist(), shard.ends)
        assert same(found.data, shard.data)
        for update in range(plan.num_updates):
            parts = zip(found.micro_batches(update), shard.micro_batches(update), strict=True)
            assert all(same(one, other) for one, other in parts)
    assert rewards.index_bytes / len(rows) < 64 + 1000 / len(rows)  # a part has a head of some hundred bytes


def test_one_rank_and_more_ranks_than_rollouts() -> None:
    rows = samples_of(2)
    rewards = normalize_on_cluster([ray.put(rows[:1]), ray.put(rows[1:])])
    [whole] = [get_shard(ref) for ref in rewards.shards(rewards.plan_shards(1))]
    assert whole.rows.tolist() == list(range(len(rows)))
    shards = [get_shard(ref) for ref in rewards.shards(rewards.plan_shards(4))]
    assert sorted(len(shard.rows) > 0 for shard in shards) == [False, False, True, True]
    assert all(shard.data.num_rows == len(shard.rows) for shard in shards)
    empty = next(shard for shard in shards if not len(shard.rows))
    assert [part.num_rows for part in empty.micro_batches(0)] == [0]


def test_shards_are_read_without_a_copy() -> None:
    rows = samples_of(4)
    for row in rows:
        row["tokens"] = np.arange(100_000)
    rewards = normalize_on_cluster([ray.put(rows)])
    [ref] = rewards.shards(rewards.plan_shards(1))
    first, second = (get_shard(ref).data["tokens"].values for _ in range(2))
    # Both are views of the same page of the object store.
    assert first.data_ptr() == second.data_ptr()
    assert first[:3].tolist() == [0, 1, 2]


def test_train_data_stays_with_its_samples() -> None:
    rows = samples_of(12)
    rewards = normalize_on_cluster([ray.put(part) for part in cut(rows, [7])])
    result = normalize_rewards(rows)
    whole = train_data_from_result(rows, result)
    parts = ray.get(rewards.train_data())
    assert [same(part, whole.select(rows)) for part, rows in zip(parts, rewards.rows, strict=True)] == [True, True]
    assert rewards.returned_bytes / len(rows) < 64 + 1000 / len(rows)


def test_errors_name_part_and_row() -> None:
    good, bad = samples_of(2), samples_of(2)
    bad[1]["reward"] = "high"
    with pytest.raises(RewardError, match=r"part 1: reward of row 1\n.*the str 'high'; also in part 2"):
        normalize_on_cluster([ray.put(good), ray.put(bad), ray.put(bad)])
    with pytest.raises(SampleError, match="no parts"):
        normalize_on_cluster([])
    ref = ray.put(good)
    with pytest.raises(SampleError, match="1 refs that are there twice"):
        normalize_on_cluster([ref, ref])
    without = normalize_on_cluster([ray.put([{"reward": 1.0, "response_length": 3, "group_index": 0, "index": 0}])])
    with pytest.raises(SampleError, match="rows without tokens"):
        without.plan_shards(2)
    rewards = normalize_on_cluster([ray.put(good)])
    plan = rewards.plan_shards(2)
    with pytest.raises(ConfigError, match=r"keep_together\n  got:      'groups'"):
        rewards.plan_shards(2, keep_together="groups")  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="1 nodes for 2 ranks"):
        rewards.shards(plan, nodes=["a"])


def test_samples_that_failed_to_be_made_raise_what_they_raised() -> None:
    @ray.remote(max_retries=0)
    def fails() -> list[Any]:
        raise ZeroDivisionError("of the sampler")

    with pytest.raises(ZeroDivisionError, match="of the sampler"):
        normalize_on_cluster([fails.remote()])


class KillsItsWorkerOnce(dict):
    """A row that ends the process that reads it, the first time."""

    def __init__(self, fields: dict[str, Any], marker: str) -> None:
        super().__init__(fields)
        self.marker = marker

    def __reduce__(self) -> Any:
        return KillsItsWorkerOnce, (dict(self), self.marker)

    def get(self, name: str, default: Any = None) -> Any:
        if name == "reward" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get(name, default)


def test_a_killed_worker_is_tried_again_and_gives_the_same_bits(tmp_path: Path) -> None:
    rows = samples_of(8)
    expected = bits(normalize_rewards(rows))
    marker = tmp_path / "killed"
    fragile = [KillsItsWorkerOnce(row, str(marker)) if n == 3 else row for n, row in enumerate(rows)]
    parts = [ray.put(part) for part in cut(fragile, [6])]
    assert not marker.exists()
    assert bits(normalize_on_cluster(parts).result) == expected
    assert marker.exists()


STREAM = NormalizationConfig(n_samples_per_prompt=4)


def test_a_stream_between_producers_and_a_consumer() -> None:
    rows = samples_of(16)
    expected = normalize_rewards(rows, STREAM)
    normalizer = RolloutNormalizer.remote(STREAM)

    @ray.remote
    def produce(normalizer: Any, samples: list[Any]) -> None:
        """Samples stay in the object store; the actor gets their columns and where they are."""
        ray.get(normalizer.add.remote(columns_from_samples(samples), [ray.put(samples)]))

    of_rollout = [[row for row in rows if row["rollout_id"] == rollout] for rollout in range(16)]
    # Every producer has rollouts of all groups.
    producing = [produce.remote(normalizer, [*of_rollout[n], *of_rollout[n + 8]]) for n in (7, 2, 0, 5, 4, 1, 6, 3)]
    found: dict[int, float] = {}
    groups = []
    while len(groups) < 4:
        taken = ray.get(normalizer.take.remote(wait_s=60, most=2))
        assert 1 <= len(taken) <= 2
        groups += taken
    for group in groups:
        for part in group.parts:
            [samples] = ray.get(part.payload)
            for row, advantage in zip(part.rows.tolist(), part.advantages.tolist(), strict=True):
                found[samples[row]["index"]] = advantage
    assert [found[n] for n in range(len(rows))] == expected.advantages.tolist()
    ray.get(producing)
    assert ray.get(normalizer.take.remote()) == []
    assert ray.get(normalizer.take.remote(wait_s=0.05)) == []
    assert ray.get(normalizer.end_step.remote()).normalized == 4


def test_a_stream_refuses_what_it_has_to_and_says_when_it_dies() -> None:
    rows = samples_of(8)
    normalizer = RolloutNormalizer.remote(STREAM, StreamConfig(late_rollouts="error"))
    late = columns_from_samples([row | {"rollout_id": "late"} for row in rows[:1]])
    assert ray.get(normalizer.add.remote(columns_from_samples(rows))) == 2
    with pytest.raises(GroupingError, match="late rollouts of prompt group 0"):
        ray.get(normalizer.add.remote(late))
    ray.kill(normalizer)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(normalizer.take.remote())


def test_a_dataset() -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    from ray.data import DataContext, from_items

    DataContext.get_current().enable_progress_bars = False
    rows = [{"group_index": n // 4, "index": n, "reward": float(n % 3), "response_length": n + 1} for n in range(16)]
    expected = normalize_rewards(rows, STREAM).advantages.tolist()
    dataset = from_items(rows, override_num_blocks=2)
    found = dataset.map_batches(
        normalize_batch, fn_kwargs={"config": STREAM}, batch_size=None, batch_format="numpy"
    ).take_all()
    assert {row["index"]: row["advantage"] for row in found} == dict(enumerate(expected))
    assert all(row["trained"] and row["rollout_reward"] == row["reward"] for row in found)
