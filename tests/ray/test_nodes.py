"""Four simulated nodes: what moves where, and what happens when workers, nodes and drivers are lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_norm import NormalizationConfig, UpdateConfig, normalize_rewards, plan_updates, split_by_data_parallel
from miles_norm.cluster import get_shard, normalize_on_cluster
from miles_norm.conversion import train_data_from_result
from miles_norm.errors import LostRowsError

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARTS, ROWS = 8, 12_500


def make_samples(part: int, rows: int) -> list[dict[str, Any]]:
    """Two rows to a rollout, eight rollouts to a group; groups are spread over all parts."""
    rng = np.random.default_rng(part)
    tokens, rewards = rng.integers(0, 50_000, (rows, 64)), rng.integers(0, 3, rows // 2) / 2
    mask = np.ones(48, np.uint8)
    return [
        {"group_index": n // 2 % (rows * PARTS // 16), "rollout_id": part * rows + n // 2, "index": n,
         "reward": float(rewards[n // 2]), "tokens": tokens[n], "response_length": 48, "loss_mask": mask}
        for n in range(rows)
    ]  # fmt: skip


def on_nodes(count: int, rows: int) -> list[Any]:
    """Refs of parts that tasks made, on the nodes by turns; any node may make one again."""
    make = ray.remote(make_samples)
    nodes = worker_nodes()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return [
        make.options(scheduling_strategy=affinity(nodes[part % len(nodes)], soft=True)).remote(part, rows)
        for part in range(count)
    ]


def worker_nodes() -> list[str]:
    """Ids of the nodes that are alive and run tasks."""
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))


def nodes_of(refs: list[Any]) -> list[list[str]]:
    found = ray.experimental.get_object_locations(refs)
    return [found[ref]["node_ids"] for ref in refs]


def bytes_at_the_driver() -> int:
    """All bytes that ever entered the object store of the driver's node, which runs no tasks."""
    from ray._private.internal_api import node_stats

    [head] = [node for node in ray.nodes() if node["Alive"] and not node["Resources"].get("CPU")]
    stats = node_stats(head["NodeManagerAddress"], head["NodeManagerPort"], False)
    return int(stats.store_stats.cumulative_created_bytes)


def one_process(count: int, rows: int) -> Any:
    samples = [sample for part in range(count) for sample in make_samples(part, rows)]
    return samples, normalize_rewards(samples)


def same_bits(result: Any, expected: Any) -> bool:
    return torch.equal(result.advantages.view(torch.int32), expected.advantages.view(torch.int32))


def test_tokens_stay_where_they_are(cluster: Any) -> None:
    parts = on_nodes(PARTS, ROWS)
    ray.wait(parts, num_returns=PARTS, fetch_local=False)
    places, before = nodes_of(parts), bytes_at_the_driver()
    assert len({node for [node] in places}) == 4
    rewards = normalize_on_cluster(parts)
    plan = plan_updates(rewards.result, UpdateConfig(rollouts_per_update=4096, max_tokens_per_gpu=8192))
    shards = rewards.shards(rewards.plan_shards(4, plan), nodes=worker_nodes())
    ray.wait(shards, num_returns=4, fetch_local=False)
    moved = bytes_at_the_driver() - before
    total = PARTS * ROWS
    # Index columns in, advantages, weights and what else a row gets back out: at most 64 bytes a row each way.
    assert rewards.index_bytes / total < 64
    assert rewards.returned_bytes / total < 64
    # The object store of the driver's node saw these and nothing else: of 512 bytes of tokens a row, none. Objects have
    # a head of some hundred bytes; the ranks and orders of rows travel as arguments, 4 and 8 bytes a row.
    assert moved <= rewards.index_bytes + rewards.returned_bytes + 12 * total + 4096 * 3 * PARTS
    assert moved < 512 * total / 5
    # No part was copied to another node, and each shard is where it was asked for.
    assert nodes_of(parts) == places
    assert nodes_of(shards) == [[node] for node in worker_nodes()]
    samples, expected = one_process(PARTS, ROWS)
    assert same_bits(rewards.result, expected)
    data = train_data_from_result(samples, expected, plan=plan)
    whole = split_by_data_parallel(data, 4, plan_updates(expected, plan.config))
    for ref, shard in zip(shards, whole, strict=True):
        found = get_shard(ref)
        assert torch.equal(found.rows, shard.rows)
        for name in ("tokens", "loss_masks"):
            assert torch.equal(found.data[name].values, shard.data[name].values)
        assert torch.equal(found.data["rewards"], shard.data["rewards"])


def test_a_lost_driver_leaves_no_orphan(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(f"""
import os, time
import ray
from miles_norm import NormalizationConfig, RolloutColumns
from miles_norm.cluster import RolloutNormalizer, normalize_on_cluster

ray.init(address={cluster.address!r}, log_to_driver=False, configure_logging=False)
normalizer = RolloutNormalizer.remote(NormalizationConfig(n_samples_per_prompt=2))
ray.get(normalizer.add.remote(RolloutColumns(group=[0], rollout=[0], reward=[1.0], trainable_tokens=[1])))

@ray.remote
def slow():
    open({str(tmp_path / "task")!r}, "w").write(str(os.getpid()))
    time.sleep(600)
    return [{{"reward": 1.0, "group_index": 0, "response_length": 1, "index": 0}}]

parts = [slow.remote()]
open({str(tmp_path / "actor")!r}, "w").write(str(ray._private.state.actors(normalizer._actor_id.hex())["Pid"]))
normalize_on_cluster(parts)
""")
    with subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ) as driver:
        try:
            pids = [int(text_of(tmp_path / name)) for name in ("actor", "task")]
            assert all(alive(pid) for pid in pids)
        finally:
            driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(alive(pid) for pid in pids)


def text_of(path: Path) -> str:
    """What a file says once it is there."""
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path.name} within two minutes"
        time.sleep(0.1)
    return path.read_text()


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@ray.remote
class Sampler:
    """Puts samples into the store itself, so that nobody can make them again."""

    def sample(self, part: int, rows: int) -> list[Any]:
        return [ray.put(make_samples(part, rows))]


def test_losses(cluster: Any, tmp_path: Path) -> None:
    """A worker killed and a node removed in the middle; this test is the last, since a node is gone after it."""
    rows = 400
    _, expected = one_process(6, rows)
    updates = UpdateConfig(rollouts_per_update=256)
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    # The worker that reads a part is killed while it does.
    marker = str(tmp_path / "killed")

    class KillsItsWorkerOnce(list):
        def __reduce__(self) -> Any:
            return read_once, (list(self), marker)

    parts = on_nodes(5, rows)
    parts.append(ray.put(KillsItsWorkerOnce(make_samples(5, rows))))
    rewards = normalize_on_cluster(parts)
    assert Path(marker).exists()
    assert same_bits(rewards.result, expected)

    # A node is removed between normalization and sharding, and with it parts of samples that tasks made.
    [lost] = {node for [node] in nodes_of(parts[:1])}
    sampler = Sampler.options(scheduling_strategy=affinity(lost, soft=False)).remote()
    [unique] = ray.get(sampler.sample.remote(9, rows))
    plan = plan_updates(rewards.result, updates)
    cluster.remove_node(next(n for n in cluster.worker_nodes if n.node_id == lost), allow_graceful=False)
    shards = [get_shard(ref) for ref in rewards.shards(rewards.plan_shards(3, plan))]
    assert lost not in worker_nodes()
    assert nodes_of(parts[:1]) != [[lost]]  # it was made again
    samples, _ = one_process(6, rows)
    whole = split_by_data_parallel(train_data_from_result(samples, expected, plan=plan), 3, plan)
    for found, shard in zip(shards, whole, strict=True):
        assert torch.equal(found.rows, shard.rows)
        assert torch.equal(found.data["tokens"].values, shard.data["tokens"].values)
        assert torch.equal(found.data["rewards"], shard.data["rewards"])
    assert same_bits(normalize_on_cluster(parts).result, expected)

    # What an actor on that node had put into the store itself is gone, and that is said.
    with pytest.raises(LostRowsError, match="rows of part 1\n"):
        normalize_on_cluster([parts[1], unique, parts[2]], NormalizationConfig())


def read_once(rows: list[Any], marker: str) -> list[Any]:
    """The rows; the first process to read them outside of a driver is killed."""
    if ray.get_runtime_context().worker.mode == ray.WORKER_MODE and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return rows
