"""miles_norm makes one rollout count once: in the reward statistics and in the loss, however many rows it was cut into.

The package loads nothing until a name is used, so importing it costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_norm.columns.rollout_columns import RolloutColumns
    from miles_norm.config import FilterConfig, LossConfig, NormalizationConfig, StreamConfig, UpdateConfig
    from miles_norm.conversion import convert_samples_to_train_data
    from miles_norm.distributed import DistributedRewards, normalize_distributed
    from miles_norm.dumps import RolloutDump, read_dump, write_dump
    from miles_norm.errors import MilesNormError
    from miles_norm.filters import filter_rollouts
    from miles_norm.grouping import RolloutIndex
    from miles_norm.loss import UpdatePlan, loss_weights, plan_updates
    from miles_norm.normalize import normalize_columns, normalize_rewards
    from miles_norm.result import NormalizedRewards
    from miles_norm.samples import Sample
    from miles_norm.sharding import Shard, ShardPlan, plan_shards, split_by_data_parallel
    from miles_norm.streaming import StreamingNormalizer
    from miles_norm.train_data import TrainData

__version__ = "0.1.0"

_HOMES = {
    "DistributedRewards": "distributed",
    "FilterConfig": "config",
    "LossConfig": "config",
    "MilesNormError": "errors",
    "NormalizationConfig": "config",
    "NormalizedRewards": "result",
    "RolloutColumns": "columns",
    "RolloutDump": "dumps",
    "RolloutIndex": "grouping",
    "Sample": "samples",
    "Shard": "sharding",
    "ShardPlan": "sharding",
    "StreamConfig": "config",
    "StreamingNormalizer": "streaming",
    "TrainData": "train_data",
    "UpdateConfig": "config",
    "UpdatePlan": "loss",
    "convert_samples_to_train_data": "conversion",
    "filter_rollouts": "filters",
    "loss_weights": "loss",
    "normalize_columns": "normalize",
    "normalize_distributed": "distributed",
    "normalize_rewards": "normalize",
    "plan_shards": "sharding",
    "plan_updates": "loss",
    "read_dump": "dumps",
    "split_by_data_parallel": "sharding",
    "write_dump": "dumps",
}

__all__ = [
    "DistributedRewards",
    "FilterConfig",
    "LossConfig",
    "MilesNormError",
    "NormalizationConfig",
    "NormalizedRewards",
    "RolloutColumns",
    "RolloutDump",
    "RolloutIndex",
    "Sample",
    "Shard",
    "ShardPlan",
    "StreamConfig",
    "StreamingNormalizer",
    "TrainData",
    "UpdateConfig",
    "UpdatePlan",
    "convert_samples_to_train_data",
    "filter_rollouts",
    "loss_weights",
    "normalize_columns",
    "normalize_distributed",
    "normalize_rewards",
    "plan_shards",
    "plan_updates",
    "read_dump",
    "split_by_data_parallel",
    "write_dump",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
