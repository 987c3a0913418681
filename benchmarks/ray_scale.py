"""What moves when a batch is spread over machines? Bytes and times on a simulated Ray cluster, measured in this run.

    python benchmarks/ray_scale.py            a million rows on four nodes, some minutes, 4 GB
    python benchmarks/ray_scale.py --short    40,000 rows on two nodes, about a minute
    python benchmarks/ray_scale.py --json F   the figures to a file as well

The nodes are processes of this machine, each with one CPU and an object store of its own; the head runs no task and
holds the driver, so that every byte in its store came to the driver. Samples are made by tasks on the nodes, 64 tokens
a row. Timed are normalization from refs to advantages, and shards for four ranks put into the stores of the nodes.
The baseline is one process that has all samples in its memory; results must have the same bits, or the script fails.
The floor of the bytes is 12 a row: a float64 reward and an int32 token count.
"""

import argparse
import json
import logging
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from miles_norm import UpdateConfig, normalize_rewards, plan_updates
from miles_norm.cluster import normalize_on_cluster

TOKENS, RESPONSE, PART_ROWS, RANKS = 64, 48, 10_000, 4
MIB = 2**20


def make_samples(part: int, parts: int) -> list[dict[str, Any]]:
    """Rows of one part: two to a rollout, eight rollouts to a group, groups spread over all parts."""
    rng = np.random.default_rng(part)
    tokens = rng.integers(0, 50_000, (PART_ROWS, TOKENS)).astype(np.int32)
    rewards = rng.integers(0, 3, PART_ROWS // 2) / 2
    mask = np.ones(RESPONSE, np.uint8)
    groups = PART_ROWS * parts // 16
    return [
        {"group_index": n // 2 % groups, "rollout_id": part * PART_ROWS + n // 2, "index": n, "loss_mask": mask,
         "reward": float(rewards[n // 2]), "tokens": tokens[n], "response_length": RESPONSE}
        for n in range(PART_ROWS)
    ]  # fmt: skip


def start(nodes: int) -> Cluster:
    quiet = {"include_dashboard": False, "_system_config": {"memory_monitor_refresh_ms": 0}}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 512 * MIB, **quiet})
    for _ in range(nodes):
        cluster.add_node(num_cpus=1, object_store_memory=600 * MIB)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    cluster.wait_for_nodes()
    return cluster


def workers() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))


def bytes_at_the_driver() -> int:
    """All bytes that ever entered the object store of the head."""
    [head] = [node for node in ray.nodes() if not node["Resources"].get("CPU")]
    return int(
        node_stats(head["NodeManagerAddress"], head["NodeManagerPort"], False).store_stats.cumulative_created_bytes
    )


def places(refs: list[Any]) -> list[list[str]]:
    found = ray.experimental.get_object_locations(refs)
    return [found[ref]["node_ids"] for ref in refs]


def measure(parts: int, nodes: int) -> dict[str, Any]:
    cluster = start(nodes)
    try:
        make = ray.remote(make_samples)
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ids = workers()
        samples = [
            make.options(scheduling_strategy=where(ids[n % nodes], soft=True)).remote(n, parts) for n in range(parts)
        ]
        ray.wait(samples, num_returns=parts, fetch_local=False)
        before, at_first = bytes_at_the_driver(), places(samples)
        began = time.perf_counter()
        rewards = normalize_on_cluster(samples)
        normalized = time.perf_counter() - began
        rows = rewards.result.index.num_rows
        plan = plan_updates(rewards.result, UpdateConfig(rollouts_per_update=rows // 16, max_tokens_per_gpu=8192))
        began = time.perf_counter()
        shards = rewards.shards(rewards.plan_shards(RANKS, plan), nodes=[ids[rank % nodes] for rank in range(RANKS)])
        ray.wait(shards, num_returns=RANKS, fetch_local=False)
        cut = time.perf_counter() - began
        moved = bytes_at_the_driver() - before
        schedule = 12 * rows  # ranks and orders of rows travel as arguments: 4 and 8 bytes
        beside = moved - rewards.index_bytes - rewards.returned_bytes - schedule
        assert places(samples) == at_first, "a part was copied to another node"
        return {
            "rows": rows,
            "nodes": nodes,
            "parts": parts,
            "normalize_seconds": normalized,
            "shard_seconds": cut,
            "index_bytes_per_row": rewards.index_bytes / rows,
            "returned_bytes_per_row": rewards.returned_bytes / rows,
            "driver_bytes_per_row": moved / rows,
            "token_bytes_at_the_driver": max(0, beside) if beside > 5000 * (parts + RANKS) else 0,
            "token_bytes_per_row": TOKENS * 4 + RESPONSE,
            "advantages": rewards.result.advantages,
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="40,000 rows on two nodes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    logging.getLogger("ray").setLevel(logging.ERROR)
    parts, nodes = (4, 2) if options.short else (100, 4)
    print(f"ray {ray.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    figures = measure(parts, nodes)
    advantages = figures.pop("advantages")
    samples = [sample for part in range(parts) for sample in make_samples(part, parts)]
    began = time.perf_counter()
    expected = normalize_rewards(samples).advantages
    figures["one_process_seconds"] = time.perf_counter() - began
    assert torch.equal(advantages.view(torch.int32), expected.view(torch.int32)), "other bits than in one process"
    f = figures
    print(f"{f['rows']} rows in {parts} parts on {nodes} nodes: the bits of one process")
    print(f"index columns to the driver: {f['index_bytes_per_row']:.1f} bytes a row (12 at least)")
    print(f"advantages, weights and ids back: {f['returned_bytes_per_row']:.1f} bytes a row")
    print(f"all bytes in the driver's store: {f['driver_bytes_per_row']:.1f} a row, ranks and orders of rows included;")
    print(f"  bytes of tokens: {f['token_bytes_at_the_driver']} (they are {f['token_bytes_per_row']} a row)")
    print(f"normalized in {f['normalize_seconds']:.1f} s, shards in {f['shard_seconds']:.1f} s; ", end="")
    print(f"one process normalizes in {f['one_process_seconds']:.1f} s")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
