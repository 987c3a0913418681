"""Train data: columns that fit together, the dict that Miles takes, batches against a slow oracle."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm.errors import SampleError
from miles_norm.train_data import TrainData
from miles_norm.train_data.ragged import Ragged


def ints(rows):
    return Ragged.from_rows(rows, torch.int64)


def floats(rows):
    return Ragged.from_rows(rows, torch.float64)


@st.composite
def batches(draw, min_rows=0):
    """Rows as dicts, and the train data made of them."""
    rows = []
    for n in range(draw(st.integers(min_rows, 5))):
        prompt = draw(st.lists(st.integers(0, 99), max_size=3))
        response = draw(st.lists(st.integers(0, 99), max_size=4))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
        logs = draw(st.lists(st.floats(-5, 0, width=32), min_size=len(response), max_size=len(response)))
        reward = draw(st.floats(-2, 2, width=32))
        rows.append({
            "tokens": prompt + response, "response_lengths": len(response), "loss_masks": mask,
            "rollout_log_probs": logs, "rewards": reward, "rollout_ids": draw(st.sampled_from([n, str(n), None])),
            "truncated": draw(st.integers(0, 1)), "weights": draw(st.floats(0, 1)),
        })  # fmt: skip
    column = {name: [row[name] for row in rows] for name in ROW_KEYS}
    flat = draw(st.booleans())
    ragged = {name: kind(column[name]) for name, kind in (("tokens", ints), ("loss_masks", ints),
                                                          ("rollout_log_probs", floats))}  # fmt: skip
    if flat:
        ragged = {name: Ragged(value.values, value.offsets) for name, value in ragged.items()}
    rest = {
        "response_lengths": column["response_lengths"],
        "rewards": torch.tensor(column["rewards"], dtype=torch.float32),
        "rollout_ids": column["rollout_ids"],
        "truncated": torch.tensor(column["truncated"], dtype=torch.bool),
        "weights": torch.tensor(column["weights"], dtype=torch.float64),
    }
    return rows, TrainData({**ragged, **rest}, {"prompt_group_sizes": [len(rows)], "sizes": {0: 8, 1: 6}})


ROW_KEYS = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rewards", "rollout_ids", "truncated",
            "weights")  # fmt: skip
MILES_KEYS = ROW_KEYS[:-1]


def as_dict(rows, keys=MILES_KEYS):
    return {name: [row[name] for row in rows] for name in keys}


STEP = ("prompt_group_sizes", "sizes")


@given(batches())
def test_miles_dict(batch):
    rows, data = batch
    found = data.as_miles_dict()
    assert {name: found[name] for name in MILES_KEYS} == as_dict(rows)
    assert found.keys() - set(MILES_KEYS) == set(STEP)
    assert found["sizes"] == {0: 8, 1: 6}
    for name in ("tokens", "loss_masks"):
        assert all(type(value) is int for row in found[name] for value in row)
    assert all(type(value) is int for value in [*found["truncated"], *found["response_lengths"]])
    assert all(type(value) is float for value in found["rewards"])
    assert data.as_miles_dict(own_columns=True)["weights"] == [row["weights"] for row in rows]


@given(batches(), st.data())
def test_select_then_dict_is_dict_then_select(batch, choose):
    rows, data = batch
    numbers = choose.draw(st.lists(st.integers(0, len(rows) - 1), max_size=7)) if rows else []
    found = data.select(numbers)
    TrainData(found.columns, found.step)  # passes the checks
    assert {n: found.as_miles_dict()[n] for n in MILES_KEYS} == as_dict([rows[n] for n in numbers])
    part = data.select(slice(1, 3))
    assert {n: part.as_miles_dict()[n] for n in MILES_KEYS} == as_dict(rows[1:3])
    assert part.step == data.step


@given(batches())
def test_parts_join_to_the_whole(batch):
    _, data = batch
    whole = TrainData.concat([data.select(slice(0, 2)), data.select(slice(2, 2)), data.select(slice(2, None))])
    assert whole.as_miles_dict(own_columns=True) == data.as_miles_dict(own_columns=True)
    assert list(whole.columns) == list(data.columns)


def oracle(rows, width):
    """Fields of a padded batch, cell by cell."""
    fields = {name: [] for name in ("input_ids", "attention_mask", "response_mask", "loss_mask", "advantages",
                                    "rollout_log_probs")}  # fmt: skip
    for row in rows:
        cells = {name: [] for name in fields}
        for position in range(width):
            real = position < len(row["tokens"])
            k = position - (len(row["tokens"]) - row["response_lengths"])
            response = real and k >= 0
            trained = response and row["loss_masks"][k] == 1
            cells["input_ids"].append(row["tokens"][position] if real else 7)
            cells["attention_mask"].append(real)
            cells["response_mask"].append(response)
            cells["loss_mask"].append(trained)
            cells["advantages"].append(row["rewards"] if trained else 0.0)
            cells["rollout_log_probs"].append(row["rollout_log_probs"][k] if response else 0.0)
        for name, values in cells.items():
            fields[name].append(values)
    return fields


@given(batches(), st.integers(0, 2))
def test_padded_batch_against_the_oracle(batch, more):
    rows, data = batch
    width = max((len(row["tokens"]) for row in rows), default=0) + more
    found = data.padded_batch(width, pad_token_id=7)
    assert found.pop("weights").tolist() == [row["weights"] for row in rows]
    assert {name: values.tolist() for name, values in found.items()} == oracle(rows, width)
    assert found["input_ids"].dtype == torch.int64
    assert found["advantages"].dtype == torch.float32


@given(batches())
def test_packed_batch_is_the_padded_one_without_padding(batch):
    rows, data = batch
    packed, padded = data.packed_batch(), data.padded_batch()
    ends = packed.pop("cu_seqlens")
    assert ends.dtype == torch.int32
    assert ends.tolist() == np.cumsum([0, *(len(row["tokens"]) for row in rows)]).tolist()
    assert packed.pop("position_ids").tolist() == [n for row in rows for n in range(len(row["tokens"]))]
    assert torch.equal(packed.pop("weights"), padded.pop("weights"))
    real = padded.pop("attention_mask")
    assert packed.keys() == padded.keys()
    for name, values in packed.items():
        assert torch.equal(values, padded[name][real])


@given(batches())
def test_pickled_data_comes_back(batch):
    _, data = batch
    back = pickle.loads(pickle.dumps(data))
    assert repr(back.as_miles_dict(own_columns=True)) == repr(data.as_miles_dict(own_columns=True))
    assert {name: getattr(v, "dtype", None) for name, v in back.columns.items()} == {
        name: getattr(v, "dtype", None) for name, v in data.columns.items()
    }


def test_pickled_data_is_not_copied_out_of_shared_memory():
    tokens = Ragged(torch.arange(10), [0, 4, 10])
    data = TrainData({
        "tokens": tokens, "response_lengths": [0, 1], "ids": ["tensor", None],
        "rollout_log_probs": Ragged(torch.tensor([0.5], dtype=torch.bfloat16), [0, 0, 1]),
    })  # fmt: skip
    buffers = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    memory = [bytes(buffer) for buffer in buffers]  # read-only, as an object store has it
    back = pickle.loads(text, buffers=memory)
    address = np.frombuffer(memory[0], np.uint8).__array_interface__["data"][0]
    assert back["tokens"].values.data_ptr() == address
    assert back["tokens"].tolists() == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert back["ids"] == ["tensor", None]
    assert back["rollout_log_probs"].values.dtype == torch.bfloat16
    assert back["rollout_log_probs"].tolists() == [[], [0.5]]


def small(**changes):
    columns = {
        "tokens": ints([[1, 2, 3], [4, 5]]),
        "response_lengths": [2, 1],
        "loss_masks": ints([[1, 0], [1]]),
        "rewards": torch.tensor([0.5, -1.0]),
        **changes,
    }
    return TrainData({name: value for name, value in columns.items() if value is not None})


def test_batches_with_few_columns():
    # Without loss masks every response token is trainable; without rewards and weights there are no such fields.
    found = small(loss_masks=None, rewards=None).padded_batch()
    assert found.keys() == {"input_ids", "attention_mask", "response_mask", "loss_mask"}
    assert found["loss_mask"].tolist() == [[False, True, True], [False, True, False]]
    assert small(rewards=[1, 2.5]).packed_batch()["advantages"].tolist() == [0, 1, 0, 0, 2.5]


def test_columns_with_trailing_dimensions_become_arrays():
    experts = [np.ones((2, 1, 2), np.int32), np.zeros((1, 1, 2), np.int32)]
    data = small(rollout_routed_experts=Ragged.from_rows(experts, torch.int32))
    assert data.as_miles_dict()["rollout_routed_experts"] == experts
    flat = data.select(slice(None))
    assert [row.tolist() for row in flat.as_miles_dict()["rollout_routed_experts"]] == [row.tolist() for row in experts]


def test_bool_masks_and_lists_are_what_miles_writes():
    masks = Ragged.from_rows([[True, False], [True]], torch.bool)
    data = small(loss_masks=Ragged(masks.values, masks.offsets), flags=torch.tensor([True, False]))
    assert repr(data.as_miles_dict()["loss_masks"]) == "[[1, 0], [1]]"
    assert data.as_miles_dict()["flags"] == [True, False]
    rows = [[1, 2, 3], [4, 5]]
    assert small(tokens=ints(rows)).as_miles_dict()["tokens"][0] is rows[0]


def test_access():
    data = TrainData(small().columns, {"step_slots": [0]})
    assert (len(data), data.num_rows, data.num_tokens) == (2, 2, 5)
    assert data["tokens"] is data.columns["tokens"]
    assert data["step_slots"] == [0]
    assert "tokens" in data
    assert "step_slots" in data
    assert "other" not in data
    with pytest.raises(KeyError, match="other"):
        data["other"]
    assert repr(data) == "TrainData(2 rows, 5 tokens: tokens, response_lengths, loss_masks, rewards; step: step_slots)"
    assert data.to("cpu").as_miles_dict() == data.as_miles_dict()
    assert len(data.select([])) == 0


@pytest.mark.parametrize(
    ("changes", "rows", "text"),
    [
        ({"loss_masks": ints([[1], [1]])}, (0,), "loss_masks of row 0\n.*lengths 1 for a response of 2"),
        ({"rollout_log_probs": floats([[], []])}, (0, 1), "rollout_log_probs of rows 0, 1"),
        ({"response_lengths": [4, 3], "loss_masks": None}, (0, 1), "tokens of rows 0, 1"),
        ({"response_lengths": [2, -1], "loss_masks": None}, (1,), "tokens of row 1"),
        ({"rewards": torch.ones(3), "metadata": [{}]}, (), "rewards with 3, metadata with 1"),
        ({"tokens": None}, (), "no column tokens"),
        ({"tokens": [[1, 2, 3], [4, 5]]}, (), r"column 'tokens'(.|\n)*list(.|\n)*a Ragged of numbers"),
        ({"tokens": Ragged(torch.ones(2, 2), [0, 1, 2])}, (), r"entries of shape \[2\]"),
        ({"loss_masks": torch.ones(2)}, (), "column 'loss_masks'"),
        ({"rewards": 1.0}, (), r"float(.|\n)*a tensor \[N, ...\]"),
        ({"rewards": torch.tensor(1.0)}, (), "column 'rewards'"),
        ({"response_lengths": [0.5, 1]}, (), "dtype torch.float32"),
        ({"response_lengths": ["a", 1]}, (), "response_lengths of train data"),
        ({"response_lengths": ints([[2], [1]])}, (), "a Ragged"),
        ({3: [1, 2]}, (), "names that are no strings"),
    ],
)
def test_columns_that_do_not_fit(changes, rows, text):
    columns = {**small().columns, **changes}
    with pytest.raises(SampleError, match=text) as caught:
        TrainData({name: value for name, value in columns.items() if value is not None})
    assert caught.value.rows == rows


def test_names_used_twice():
    with pytest.raises(SampleError, match="rewards, tokens in columns and in step"):
        TrainData(small().columns, {"tokens": 1, "rewards": 2})


def test_masks_that_are_no_masks():
    with pytest.raises(SampleError, match=r"loss mask of rows 0, 1\n.*the entry 2") as caught:
        small(loss_masks=ints([[1, 2], [3]])).packed_batch()
    assert caught.value.rows == (0, 1)
    with pytest.raises(SampleError, match="length of row 0"):
        small().padded_batch(2)


def test_parts_that_do_not_fit():
    data = small()
    with pytest.raises(SampleError, match="no parts"):
        TrainData.concat([])
    with pytest.raises(SampleError, match="extra, rewards in some parts only"):
        TrainData.concat([data, TrainData({**small(rewards=None).columns, "extra": [1, 2]})])
    with pytest.raises(SampleError, match=r"Tensor torch\.float32 and list"):
        TrainData.concat([data, small(rewards=[1, 2])])
    one = {"a": [1], "b": torch.ones(2), "c": float("nan"), "d": {0: np.ones(2)}, "e": 1, "f": 1, "g": [1]}
    two = {"a": [1], "b": torch.ones(2), "c": float("nan"), "d": {0: np.ones(2)}, "e": 1.0, "g": [1, 2], "h": None}
    with pytest.raises(SampleError, match=r"different values of e, f, g, h\n"):
        TrainData.concat([TrainData(data.columns, one), TrainData(data.columns, two)])
    assert TrainData.concat([TrainData(data.columns, one)] * 2).step is not one


@pytest.mark.gpu
def test_batches_on_a_gpu():
    data = small(weights=torch.tensor([0.5, 0.5], dtype=torch.float64))
    here, there = data.padded_batch(), data.to("cuda").padded_batch()
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)
    assert data.to("cuda").as_miles_dict() == data.as_miles_dict()
    assert data.to("cuda").select([1]).as_miles_dict() == data.select([1]).as_miles_dict()
