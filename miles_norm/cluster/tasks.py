"""What runs where the samples are. Every task can be run again: it reads its arguments and changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.columns import columns_from_samples
from miles_norm.columns.parts import packed_columns, unpacked_columns
from miles_norm.columns.row_values import row_length
from miles_norm.columns.sample_columns import flatten_samples, row_field
from miles_norm.config import NormalizationConfig
from miles_norm.conversion import joined_train_data, train_data_from_columns
from miles_norm.sharding import Shard
from miles_norm.train_data import TrainData

__all__ = ["convert_part", "cut_part", "join_shard", "read_part", "sent_columns"]


def read_part(samples: Sequence[Any], config: NormalizationConfig) -> bytes:
    """The index columns of some samples, and the number of tokens of each (None without tokens), pickled.

    Of no samples there is None: all rollouts of a node may have been dropped.
    """
    rows = flatten_samples(samples)[0]
    if not rows:
        return pickle.dumps(None)
    columns = columns_from_samples(samples, config)
    lengths = [row_length(tokens) for tokens in row_field(rows, "tokens")]
    return pickle.dumps((columns, None if None in lengths else np.array(lengths, np.int32)))


def sent_columns(found: Mapping[str, Tensor], rows: slice) -> bytes:
    """What a result says of some rows, pickled."""
    return pickle.dumps(packed_columns({name: column[rows] for name, column in found.items()}))


def _part(samples: Sequence[Any], found: bytes, metadata: Mapping[str, Any]) -> TrainData:
    return train_data_from_columns(samples, unpacked_columns(pickle.loads(found)), metadata)


def convert_part(samples: Sequence[Any], found: bytes, metadata: Mapping[str, Any]) -> TrainData:
    """The train data of some samples, in the object store of the node where they are."""
    return _part(samples, found, metadata)


def cut_part(samples: Sequence[Any], found: bytes, metadata: Mapping[str, Any], rank: bytes, ranks: int) -> Any:
    """The train data of some samples in one piece per rank, without rows for a rank that gets none of them.

    ``rank`` is int32 ``[n]`` as bytes, -1 for rows that are in no shard.
    """
    data, of_row = _part(samples, found, metadata), np.frombuffer(rank, np.int32)
    order = np.argsort(of_row, kind="stable")
    ends = np.searchsorted(of_row[order], np.arange(ranks + 1))
    pieces = [data.select(order[start:stop]) for start, stop in pairwise(ends)]
    return pieces if ranks > 1 else pieces[0]


def join_shard(rank: int, rows: bytes, ends: list[list[int]], *pieces: TrainData) -> Shard:
    """The shard of a rank: its pieces, part after part, brought into the order of its schedule.

    ``rows`` is int64 as bytes: the rows of the shard in that order.
    """
    numbers = torch.from_numpy(np.frombuffer(rows, np.int64).copy())
    # Within a piece rows ascend, and so they do from part to part.
    place = torch.sort(numbers).indices.argsort()
    return Shard(rank, joined_train_data(pieces).select(place), numbers, ends)
