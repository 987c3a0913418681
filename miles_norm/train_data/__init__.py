"""What a trainer eats, in columns: ragged token columns that stay lists or views, row columns, batches."""

from miles_norm.train_data.data import TrainData
from miles_norm.train_data.ragged import Ragged

__all__ = ["Ragged", "TrainData"]
