"""Rows as Agent Lightning's trainer holds them, in a stand-in for verl's DataProto."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.integrations.agent_lightning import compute_rollout_level_advantage

# Prompt p: rollout a on two rows with reward 1, b with 0; prompt q: rollout c alone.
ROWS: dict[str, Any] = {"tokens": [2, 3, 1, 2], "rewards": [1.0, 1.0, 0.0, 1.0], "rollouts": list("aabc")}


class Batch:
    """What the drop-ins use of verl's DataProto: two fields of columns, a length, and rows by number."""

    def __init__(self, batch: dict[str, Tensor], non_tensor_batch: dict[str, np.ndarray]) -> None:
        self.batch, self.non_tensor_batch = batch, non_tensor_batch

    def __len__(self) -> int:
        return len(self.batch["response_mask"])

    def __getitem__(self, rows: Sequence[int]) -> "Batch":
        return Batch(
            {name: column[rows] for name, column in self.batch.items()},
            {name: column[rows] for name, column in self.non_tensor_batch.items()},
        )


def mask_of(tokens: Sequence[int]) -> Tensor:
    return (torch.arange(max(tokens))[None, :] < torch.tensor(tokens)[:, None]).long()


def batch_of(tokens: Sequence[int], rewards: Sequence[float], rollouts: Sequence[Any], uids: Sequence[Any]) -> Batch:
    """Each row's reward stands on its last response token, in bfloat16 as upstream's adapter leaves it."""
    mask = mask_of(tokens)
    scores = torch.zeros(mask.shape, dtype=torch.bfloat16)
    scores[range(len(tokens)), [max(n - 1, 0) for n in tokens]] = torch.tensor(rewards, dtype=torch.bfloat16)
    ids = {"rollout_id_list": np.array(rollouts, dtype=object), "data_id_list": np.array(uids, dtype=object)}
    return Batch({"response_mask": mask, "token_level_rewards": scores}, ids)


def advantages_of(batch: Batch, **settings: Any) -> Tensor:
    settings = {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "num_repeat": 4, **settings}
    result, _ = compute_rollout_level_advantage(batch, **settings)
    assert result is batch
    return batch.batch["advantages"]
