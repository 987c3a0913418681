"""Train data and rollout dumps in columns: safetensors, to be mapped into memory, and Parquet, for other programs."""

from miles_norm.storage.train_files import iter_train_data, read_train_data, write_train_data

__all__ = ["iter_train_data", "read_train_data", "write_train_data"]
