"""Train data for many ranks: whole rollouts, balanced by tokens, as many micro-batches on every rank."""

from miles_norm.sharding.schedule import ShardPlan, plan_shards
from miles_norm.sharding.shards import Shard, split_by_data_parallel

__all__ = ["Shard", "ShardPlan", "plan_shards", "split_by_data_parallel"]
