"""The same functions over many machines, with Ray: samples stay where they are, only their index columns meet."""

from typing import Any

from miles_norm.cluster.actor import StreamActor, rollout_normalizer
from miles_norm.cluster.datasets import normalize_batch
from miles_norm.cluster.rewards import ClusterRewards, get_shard, normalize_on_cluster

__all__ = [
    "ClusterRewards",
    "RolloutNormalizer",
    "StreamActor",
    "get_shard",
    "normalize_batch",
    "normalize_on_cluster",
]


def __getattr__(name: str) -> Any:
    # A class of actors is made by ray, which is needed only then.
    if name == "RolloutNormalizer":
        return rollout_normalizer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
