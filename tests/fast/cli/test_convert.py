"""``miles-norm convert``: the same train data as the function gives, from packed rows; one error for each bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EXAMPLE, Run

from miles_norm import NormalizationConfig, convert_samples_to_train_data, read_dump
from miles_norm.storage import read_train_data


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet"])
def test_writes_what_the_function_gives(run: Callable[..., Run], tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"train{suffix}"
    done = run("convert", EXAMPLE, out, "--set", "advantage_estimator=rloo")
    assert done.code == 0
    assert done.out == ""
    samples = read_dump(EXAMPLE).samples
    tokens = sum(len(sample["tokens"]) for sample in samples)
    assert f"58 rows, {tokens} tokens" in " ".join(done.err.split())
    found = read_train_data(out)
    expected = convert_samples_to_train_data(samples, NormalizationConfig(advantage_estimator="rloo"))
    assert list(found.columns) == list(expected.columns)
    left, right = found.as_miles_dict(), expected.as_miles_dict()
    # Log-probs are float32 once they are packed; lists keep what JSON or a .pt held.
    as_float32 = torch.tensor([value for row in right.pop("rollout_log_probs") for value in row])
    packed = torch.tensor([value for row in left.pop("rollout_log_probs") for value in row])
    assert torch.equal(packed, as_float32)
    assert left == right


def test_recorded_sizes_and_adapters_reach_the_step(run: Callable[..., Run], tmp_path: Path) -> None:
    out = tmp_path / "train.safetensors"
    dump = Path(__file__).parents[1] / "data" / "miles_multi_lora.pt"
    assert run("convert", dump, out).code == 0
    data = read_train_data(out)
    assert data.step["prompt_group_sizes"] == [8, 6, 5, 6]
    assert data.step["step_adapter_batch_sizes"] == {0: 8, 1: 6}


def rows(**fields: Any) -> str:
    row = {"group_index": 0, "index": 0, "reward": 1.0, "tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 0]}
    return "".join(json.dumps(row | {"index": n} | (fields if n else {})) + "\n" for n in range(2))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_mask": [0.5, 1]}, "row 1: loss_mask with entries other than 0 and 1, such as 0.5"),
        ({"loss_mask": [1]}, "loss_mask of row 1"),
        ({"tokens": [1.5, 2, 3]}, "row 1"),
        ({"tokens": None}, "tokens of row 1"),
        ({"rollout_log_probs": [0.1, 0.2]}, "rollout_log_probs of row 0"),
    ],
)
def test_bad_rows_are_named(run: Callable[..., Run], tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    dump = tmp_path / "rows.jsonl"
    dump.write_text(rows(**fields), encoding="utf-8")
    done = run("convert", dump, tmp_path / "train.safetensors")
    assert done.code == 2
    assert text in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "train.safetensors").exists()


def test_an_existing_file_is_kept(run: Callable[..., Run], tmp_path: Path) -> None:
    out = tmp_path / "train.parquet"
    out.write_bytes(b"mine")
    assert run("convert", EXAMPLE, out).code == 2
    assert out.read_bytes() == b"mine"
    assert run("convert", EXAMPLE, out, "--force").code == 0
    assert read_train_data(out).num_rows == 58


def test_other_suffixes_are_refused(run: Callable[..., Run], tmp_path: Path) -> None:
    done = run("convert", EXAMPLE, tmp_path / "train.npz")
    assert done.code == 2
    assert ".safetensors" in done.err
