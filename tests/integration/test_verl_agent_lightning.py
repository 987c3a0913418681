"""Agent Lightning's drop-ins on verl's own DataProto, against verl's own estimators on one row per rollout."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_norm.integrations.agent_lightning import compute_rollout_level_advantage, normalize_advantages_by_rollout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of engines that are not installed
    ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer", reason="needs verl: make test-verl")
    verl = pytest.importorskip("verl", reason="needs verl: make test-verl")

pytestmark = pytest.mark.integration

# Two prompts of three rollouts, of one to three rows with as many trainable tokens as listed.
ROLLOUTS = [
    ("p", "a", 1.0, [3, 2]),
    ("p", "b", 0.0, [4]),
    ("p", "c", 0.25, [1, 2, 5]),
    ("q", "d", 0.5, [2]),
    ("q", "e", 0.75, [5, 1]),
    ("q", "f", 0.0, [4]),
]


def batch() -> Any:
    rows = [(uid, rollout, reward, tokens) for uid, rollout, reward, fan_out in ROLLOUTS for tokens in fan_out]
    mask = (torch.arange(5)[None, :] < torch.tensor([row[3] for row in rows])[:, None]).float()
    rewards = torch.zeros_like(mask)
    rewards[range(len(rows)), [row[3] - 1 for row in rows]] = torch.tensor([row[2] for row in rows])
    return verl.DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_rewards": rewards},
        non_tensors={
            "data_id_list": np.array([row[0] for row in rows], dtype=object),
            "rollout_id_list": np.array([row[1] for row in rows], dtype=object),
        },
    )


def advantages(estimator: Any, **settings: Any) -> Tensor:
    settings = {"gamma": 1.0, "lam": 1.0, "num_repeat": 3, **settings}
    result, counts = compute_rollout_level_advantage(batch(), adv_estimator=estimator, **settings)
    assert counts["training/rollout_level_advantage/n_rollouts"] == 6
    return result.batch["advantages"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("GRPO", {}), ("GRPO", {"norm_adv_by_std_in_grpo": False}), ("GRPO_VECTORIZED", {}), ("RLOO", {})],
)
def test_estimators_are_those_of_verl_on_one_row_per_rollout(name: str, settings: dict[str, Any]) -> None:
    estimator = ray_trainer.AdvantageEstimator[name]
    upstream = advantages(estimator, compute_advantage_fn=ray_trainer.compute_advantage, **settings)
    torch.testing.assert_close(advantages(estimator, **settings), upstream, rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(upstream) > 0


def test_weights_of_a_batch_add_up() -> None:
    data = batch()
    ids, mask = data.non_tensor_batch["rollout_id_list"], data.batch["response_mask"]
    by_rows = normalize_advantages_by_rollout(torch.ones_like(mask), mask, ids, num_trained_rows=len(data))
    assert float((by_rows * mask).sum()) == pytest.approx(6 / 10, rel=1e-6)
    by_rollouts = normalize_advantages_by_rollout(torch.ones_like(mask), mask, ids)
    assert float((by_rollouts * mask).sum()) == pytest.approx(1.0, rel=1e-6)
