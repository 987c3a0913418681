"""Batches of a dataset: advantages as columns, and no group that is cut."""

import numpy as np
import pytest
import torch

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.cluster import normalize_batch
from miles_norm.errors import ConfigError, GroupingError, RewardError, SampleError


def test_columns_of_a_batch_are_read_like_rows() -> None:
    rows = [
        {"prompt": f"p{n // 3}", "rollout_id": n // 2, "reward": {"score": float(n % 4), "style": 1}, "status": status,
         "loss_mask": np.ones(n % 3, np.uint8), "remove_sample": n == 5, "metadata": {"prompt": f"p{n // 3}"}}
        for n, status in enumerate(["completed", "truncated", "completed", "completed", "truncated", "completed"])
    ]  # fmt: skip
    config = NormalizationConfig(reward_key="score", group_key="prompt", truncated_rollouts="untrain")
    expected = normalize_rewards(rows, config)
    batch = {name: np.array([row[name] for row in rows], dtype=object) for name in rows[0] if name != "prompt"}
    found = normalize_batch(batch, config, whole_groups=True)
    assert torch.equal(torch.from_numpy(found["advantage"]), expected.advantages)
    assert found["trained"].tolist() == expected.trained_rows.tolist()


def test_batches_hold_whole_groups() -> None:
    batch = {"group_index": np.array([0, 0, 1]), "index": np.arange(3), "reward": np.array([1.0, 0.0, 1.0]),
             "loss_mask": np.array([np.ones(2), np.zeros(1), np.ones(3)], dtype=object)}  # fmt: skip
    two = NormalizationConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo")
    with pytest.raises(GroupingError, match=r"prompt group 1\n.*fewer than n_samples_per_prompt=2"):
        normalize_batch(batch, two)
    found = normalize_batch(batch, NormalizationConfig(advantage_estimator="dr_grpo"), whole_groups=True)
    assert found["advantage"].tolist() == [0.5, -0.5, 0.0]
    assert found["trained"].tolist() == [True, False, True]
    assert found["index"] is batch["index"]
    with pytest.raises(ConfigError, match="no n_samples_per_prompt, and whole_groups is False"):
        normalize_batch(batch, NormalizationConfig())
    with pytest.raises(ConfigError, match=r"options\.whitening='rollout'"):
        normalize_batch(batch, NormalizationConfig(n_samples_per_prompt=2, options={"whitening": "rollout"}))
    with pytest.raises(RewardError, match="no field 'reward'"):
        normalize_batch({"group_index": np.zeros(2), "index": np.arange(2)}, two)


def test_what_is_no_batch_and_no_config_is_refused() -> None:
    with pytest.raises(SampleError, match=r"batch\n.*type list\n(.|\n)*batch_format='numpy'"):
        normalize_batch([{"reward": 1.0}], NormalizationConfig(n_samples_per_prompt=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a NormalizationConfig"):
        normalize_batch({}, {"n_samples_per_prompt": 2})  # type: ignore[arg-type]
