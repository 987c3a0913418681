"""Train data and dumps with values of every kind, for the tests of files."""

import itertools
import struct

import numpy as np
import torch
from hypothesis import strategies as st

from miles_norm.dumps import RolloutDump
from miles_norm.train_data import TrainData
from miles_norm.train_data.ragged import Ragged

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
          torch.float16, torch.bfloat16, torch.float32, torch.float64]  # fmt: skip


def canon(value):
    """A value as something that is equal only for the same types and bits."""
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("<dd", value.real, value.imag)
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return "tensor", str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Ragged):
        return "ragged", canon(value.values), value.offsets.tolist()
    if isinstance(value, dict):
        return "dict", [(canon(key), canon(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [canon(item) for item in value]
    return type(value).__name__, value


NAN_BITS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(2**2000), st.floats(), NAN_BITS,
    st.text(st.characters(categories=None), max_size=4), st.binary(max_size=3), st.complex_numbers(),
    st.sampled_from([np.float32(1.5), np.int64(3), np.array([1, 2], ">i2"), np.array(["a", "ü"]), np.array(2.5),
                     np.ones((2, 0)), torch.arange(3), torch.tensor(2.5), torch.ones(2, dtype=torch.bfloat16),
                     torch.ones(1, dtype=torch.complex64), torch.ones(0, 2), torch.tensor([True, False])]),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(["$", "a", "metadata"]), st.text(st.characters(categories=None), max_size=3))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(KEYS, st.integers(-3, 3), st.none()), inner, max_size=3),
        st.sets(st.integers(), max_size=2),
    ),
    max_leaves=6,
)


def uniform(size):
    """Columns in which most rows have one type, as in real dumps."""
    kinds = [
        st.integers(-(2**63), 2**63 - 1), NAN_BITS, st.booleans(), st.text(max_size=4),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), st.lists(NAN_BITS, max_size=4),
        st.sampled_from([np.arange(6, dtype=np.int32).reshape(-1, 1, 2), np.zeros((0, 1, 2), np.int32)]),
        st.sampled_from([torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(0, 3, dtype=torch.bfloat16)]),
        st.sampled_from([0, "0", None]), VALUES,
    ]  # fmt: skip
    return st.one_of([
        st.lists(one, min_size=size, max_size=size) for kind in kinds for one in (kind, st.one_of(st.none(), kind))
    ])  # fmt: skip


@st.composite
def train_data(draw):
    """Train data with columns of every kind."""
    lengths = draw(st.lists(st.integers(0, 3), max_size=4))
    tokens = [draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n + 2)) for n in lengths]
    dtype = draw(st.sampled_from(DTYPES))
    bits = draw(st.binary(min_size=8 * sum(lengths), max_size=8 * sum(lengths)))
    flat = torch.frombuffer(bytearray(bits) or bytearray(8), dtype=torch.uint8)[: dtype.itemsize * sum(lengths)]
    values = (flat & 1).view(torch.bool) if dtype == torch.bool else flat.view(dtype)
    columns = {
        "tokens": Ragged.from_rows(tokens, torch.int64),
        "response_lengths": lengths,
        "rollout_log_probs": Ragged(values, [0, *itertools.accumulate(lengths)]),
        "rollout_routed_experts": Ragged(torch.ones(sum(lengths), 2, 3).int(), [0, *itertools.accumulate(lengths)]),
        "weights": torch.tensor(draw(st.lists(NAN_BITS, min_size=len(lengths), max_size=len(lengths))),
                                dtype=torch.float64),
        "wide": torch.ones(len(lengths), 2, dtype=dtype),
    }  # fmt: skip
    for name in draw(st.lists(KEYS, unique=True, max_size=3)):
        columns.setdefault(name, draw(uniform(len(lengths))))
    step = draw(st.dictionaries(KEYS.filter(lambda key: key not in columns), VALUES, max_size=2))
    return TrainData(columns, step)


@st.composite
def dumps(draw):
    size = draw(st.integers(1, 4))
    columns = {name: draw(uniform(size)) for name in draw(st.lists(KEYS, unique=True, max_size=4))}
    rows = []
    for n in range(size):
        names = draw(st.permutations(list(columns)))
        kept = names[: draw(st.integers(0, len(names)))] if draw(st.booleans()) else list(columns)
        rows.append({name: columns[name][n] for name in kept})
    metadata = draw(st.dictionaries(KEYS, VALUES, max_size=2))
    return RolloutDump(rows, draw(st.one_of(st.none(), st.integers())), metadata)


def small(**columns):
    return TrainData(
        {
            "tokens": Ragged(torch.arange(5), [0, 3, 5]),
            "response_lengths": [2, 1],
            "rollout_log_probs": Ragged(torch.tensor([-0.5, -1.0, -2.0]), [0, 2, 3]),
            "rollout_ids": ["a", 1],
            **columns,
        },
        {"prompt_group_sizes": [2]},
    )
