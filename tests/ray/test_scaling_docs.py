"""What docs/scaling.md shows of Ray runs."""

from typing import Any

import pytest
import ray
from doc_blocks import Block, blocks

from miles_norm import NormalizationConfig, UpdateConfig, plan_updates
from miles_norm.cluster import normalize_batch

CONFIG = NormalizationConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo")
ROWS = [
    {"group_index": n // 2, "rollout_id": n, "reward": float(n % 2), "tokens": [5, 6, 7], "response_length": 2}
    for n in range(16)
]


def block(begin: str) -> Block:
    [found] = [each for each in blocks("python") if each.text.startswith(begin)]
    return found


@pytest.mark.usefixtures("local")
def test_refs_become_shards() -> None:
    refs = [ray.put(ROWS[:6]), ray.put(ROWS[6:])]
    names: dict[str, Any] = {"plan_updates": plan_updates, "UpdateConfig": UpdateConfig}
    names |= {"refs": refs, "config": CONFIG, "rank": 3}
    exec(block("from miles_norm.cluster import get_shard").text, names)
    # 16 rows of equal length on 8 ranks; of two rollouts one is right, so that each is half a reward from the mean.
    assert [abs(reward) for reward in names["shard"].data["rewards"].tolist()] == [0.5, 0.5]


@pytest.mark.usefixtures("local")
def test_blocks_of_a_dataset() -> None:
    from ray.data import DataContext, from_items

    DataContext.get_current().enable_progress_bars = False
    names = {"dataset": from_items(ROWS, override_num_blocks=2), "config": CONFIG, "normalize_batch": normalize_batch}
    found = eval(block("dataset.map_batches(").text, names).take_all()
    assert {row["rollout_id"]: row["advantage"] for row in found} == {n: (-0.5, 0.5)[n % 2] for n in range(16)}
