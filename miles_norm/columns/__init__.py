"""Index columns of a batch: built from tensors that exist, or read from rows of any kind."""

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.columns.sample_columns import columns_from_fields, columns_from_rows, columns_from_samples, index_fields

__all__ = ["RolloutColumns", "columns_from_fields", "columns_from_rows", "columns_from_samples", "index_fields"]
