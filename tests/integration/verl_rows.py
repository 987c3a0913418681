"""Rows of ragged rollouts as verl holds them, and its whole config."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.trainer.ppo.ray_trainer", reason="needs verl: make test-verl")

import verl
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from miles_norm.integrations.verl import rollout_uids

# What a test imports of verl it imports from here, so that it is skipped where verl is missing.
__all__ = [
    "ROLLOUTS",
    "V1",
    "AlgoConfig",
    "Rollout",
    "TensorDict",
    "advantages_of",
    "apply_kl_penalty",
    "compute_advantage",
    "core_algos",
    "data_proto",
    "of_rows",
    "omega_conf_to_dataclass",
    "ppo_loss",
    "trainer_config",
    "verl",
]

Rollout = tuple[str, int | None, float, list[list[int]]]

# Prompt, rollout, its reward, the mask of each of its rows. Trainable tokens of rollouts: p 3, 7, 5; q 8, 2.
ROLLOUTS: list[Rollout] = [
    ("p", 0, 1.0, [[1, 1, 0, 1]]),
    ("p", 1, 0.0, [[1, 1], [0, 1, 1, 1, 1], [1]]),
    ("p", 2, 0.5, [[1, 0, 0, 1], [1, 1, 1]]),
    ("q", 0, 0.25, [[1, 1, 1, 1, 1, 1], [1, 1]]),
    ("q", 1, 0.75, [[1, 0, 1]]),
]
V1 = verl.__version__ >= "0.9"


def data_proto(rollouts: list[Rollout] = ROLLOUTS, *, with_ids: bool = True) -> Any:
    """A DataProto whose rows have the reward on the last token of the response."""
    rows = [(*rollout[:3], mask) for rollout in rollouts for mask in rollout[3]]
    mask = torch.nn.utils.rnn.pad_sequence([torch.tensor(row[3]) for row in rows], batch_first=True)
    rewards = torch.zeros(mask.shape)
    rewards[range(len(rows)), [len(row[3]) - 1 for row in rows]] = torch.tensor([row[2] for row in rows])
    prompts = [row[0] for row in rows]
    uids = rollout_uids(prompts, [row[1] for row in rows]) if with_ids else np.array(prompts, dtype=object)
    tensors = {"response_mask": mask, "token_level_rewards": rewards, "row": torch.arange(len(rows))}
    return verl.DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


@functools.cache
def trainer_config(*overrides: str) -> Any:
    """The config of a training run, as its command line gives it."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    given = ["actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3", *overrides]
    given = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *given]
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", given)


def advantages_of(data: Any, estimator: str, config: Any) -> Tensor:
    """Advantages ``[N, T]`` of verl's own ``compute_advantage``."""
    return compute_advantage(data, adv_estimator=estimator, num_repeat=3, config=config).batch["advantages"]


def of_rows(advantages: Tensor, mask: Tensor) -> list[float]:
    """The advantage of each row, which has it on all its trainable tokens and nowhere else."""
    values = advantages.gather(1, mask.argmax(dim=1, keepdim=True))
    assert torch.equal(advantages, values * mask)
    return values[:, 0].tolist()
