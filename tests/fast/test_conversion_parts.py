"""Samples that are converted in parts, where they are, become the train data of all of them together."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm import NormalizationConfig, TrainData, normalize_rewards, read_dump
from miles_norm.conversion import joined_train_data, result_columns, train_data_from_columns, train_data_from_result
from miles_norm.errors import SampleError

ROOT = Path(__file__).parents[2]
DUMPS = {
    "session": ROOT / "examples/data/miles_session_v2.pt",
    "mainstream": ROOT / "tests/fast/data/miles_mainstream.pt",
    "adapters": ROOT / "tests/fast/data/miles_multi_lora.pt",
    "slime": ROOT / "tests/fast/data/slime_dump.pt",
}
read = cache(lambda name: read_dump(DUMPS[name]))
SETTINGS: dict[str, Any] = {"missing_reward": "exclude", "zero_variance_groups": "drop_from_loss"}


def in_parts(rows: list[dict[str, Any]], ends: list[int], metadata: dict[str, Any]) -> tuple[TrainData, TrainData]:
    """The train data of the rows, and that of their parts joined."""
    result = normalize_rewards(rows, NormalizationConfig(**SETTINGS), metadata.get("prompt_group_sizes"))
    found = result_columns(result)
    parts = []
    for start, stop in zip([0, *ends], [*ends, len(rows)], strict=True):
        columns = {name: column[start:stop] for name, column in found.items()}
        parts.append(train_data_from_columns(rows[start:stop], columns, metadata))
    return train_data_from_result(rows, result, metadata), joined_train_data(parts)


@pytest.mark.parametrize("name", DUMPS)
@given(data=st.data())
def test_real_dumps(name: str, data: st.DataObject) -> None:
    dump = read(name)
    ends = sorted(data.draw(st.sets(st.integers(1, len(dump.samples) - 1), max_size=5)))
    whole, joined = in_parts(dump.samples, ends, dump.metadata)
    assert joined.columns.keys() == whole.columns.keys()
    expected, found = whole.as_miles_dict(own_columns=True), joined.as_miles_dict(own_columns=True)
    assert {key: repr(value) for key, value in found.items()} == {key: repr(value) for key, value in expected.items()}


def row(**fields: Any) -> dict[str, Any]:
    return {"group_index": 0, "reward": 1.0, "tokens": [1, 2], "response_length": 1} | fields


def test_what_a_part_lacks_is_filled_in() -> None:
    rows = [
        row(index=1, weight_versions=["v1"]),
        row(index=2, multimodal_train_inputs={"image": 5}),
        row(index="three"),
    ]
    whole, joined = in_parts(rows, [1, 2], {})
    assert joined["weight_versions"] == whole["weight_versions"] == [["v1"], [], []]
    assert joined["multimodal_train_inputs"] == whole["multimodal_train_inputs"] == [None, {"image": 5}, None]
    assert joined["sample_indices"] == whole["sample_indices"] == [1, 2, "three"]


def test_batch_sizes_of_adapters_are_put_together() -> None:
    rows = [
        row(index=n, adapter={"name": f"a{n}", "slot": n}, metadata={"adapter_global_batch_size": 4 + n})
        for n in (0, 1)
    ]
    whole, joined = in_parts(rows, [1], {"step_slots": [0, 1]})
    assert joined.step == whole.step
    assert joined["step_adapter_batch_sizes"] == {0: 4, 1: 5}


def test_a_field_of_some_parts_only_is_refused() -> None:
    rows = [row(index=0, rollout_log_probs=[-1.0]), row(index=1)]
    found = result_columns(normalize_rewards(rows))
    parts = [
        train_data_from_columns([sample], {name: column[n : n + 1] for name, column in found.items()})
        for n, sample in enumerate(rows)
    ]
    with pytest.raises(SampleError, match="rollout_log_probs in some parts only"):
        joined_train_data(parts)


def test_rows_that_train_nothing_are_silenced() -> None:
    rows = [row(index=0, remove_sample=True), row(index=1, reward=0.0), row(index=2, response_length=0, tokens=[1])]
    result = normalize_rewards(rows)
    assert torch.equal(result_columns(result)["silenced"], torch.tensor([True, False, False]))
    assert in_parts(rows, [1, 2], {})[1]["loss_masks"].tolists() == [[0], [1], []]
