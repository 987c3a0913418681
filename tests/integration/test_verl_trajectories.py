"""verl's surprises with rollouts of one or several rows, and ours beside them; the keys of its v1 trainer."""

import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch
from verl_rows import (
    ROLLOUTS,
    V1,
    AlgoConfig,
    Rollout,
    advantages_of,
    apply_kl_penalty,
    compute_advantage,
    core_algos,
    data_proto,
    of_rows,
    trainer_config,
)

from miles_norm.errors import SampleError

pytestmark = pytest.mark.integration
needs_v1 = pytest.mark.skipif(not V1, reason="verl 0.8.0 has no v1 trainer")

PLAIN = AlgoConfig(norm_adv_by_std_in_grpo=False)
DR_GRPO = "+algorithm.miles_norm.normalization.advantage_estimator=dr_grpo"


def rows_of(data: Any, estimator: str, config: Any = PLAIN) -> list[float]:
    return of_rows(advantages_of(data, estimator, config), data.batch["response_mask"])


def grpo_of_verl(data: Any) -> list[float]:
    data = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    return of_rows(data.batch["advantages"], data.batch["response_mask"])


def keys_of(rollouts: list[Rollout]) -> list[str]:
    return [f"{prompt}_{session}_{n}" for prompt, session, _, masks in rollouts for n in range(len(masks))]


def of_trajectories(rollouts: list[Rollout], estimator: str, **changes: Any) -> list[float]:
    """Advantages by the function that verl's v1 trainer calls, with the uids and keys that it has."""
    from verl.trainer.ppo.v1 import trainer_base

    import miles_norm.integrations.verl_v1  # noqa: F401  # as VERL_USE_EXTERNAL_MODULES does

    data = data_proto(rollouts, with_ids=False)
    settings = {"batch_keys": keys_of(rollouts), "config": trainer_config(DR_GRPO).algorithm} | changes
    result = trainer_base.compute_advantage_for_multi_trajectories(
        data, adv_estimator=estimator, num_repeat=3, norm_adv_by_std_in_grpo=False, **settings
    )
    return of_rows(result.batch["advantages"], data.batch["response_mask"])


def test_a_group_of_one_keeps_its_reward_in_verl() -> None:
    lone = [*ROLLOUTS[:3], ("r", 0, 0.75, [[1, 1]])]
    assert grpo_of_verl(data_proto(lone))[-1] == 0.75
    assert rows_of(data_proto(lone), "miles_norm")[-1] == 0.0
    raw = trainer_config("algorithm.norm_adv_by_std_in_grpo=False", "+algorithm.miles_norm.normalization.singleton=raw")
    assert rows_of(data_proto(lone), "miles_norm", raw.algorithm)[-1] == 0.75


def test_each_row_is_an_observation_in_verl() -> None:
    """p: rows 1, 0, 0, 0, 0.5, 0.5 with mean 1/3 instead of 1/2; the failure of three rows counts three times."""
    rewards = [1.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    assert [value + 1 / 3 for value in grpo_of_verl(data_proto())[:6]] == pytest.approx(rewards, abs=1e-6)
    assert [value + 1 / 2 for value in rows_of(data_proto(), "miles_norm")[:6]] == rewards


def test_kl_in_the_reward_makes_siblings_differ() -> None:
    """Why it is refused: the same outcome, another penalty on each row."""
    config = trainer_config("algorithm.use_kl_in_reward=True").algorithm
    data = data_proto()
    data.batch["token_level_scores"] = data.batch["token_level_rewards"]
    data.batch["old_log_probs"] = torch.zeros(data.batch["response_mask"].shape)
    data.batch["ref_log_prob"] = torch.full_like(data.batch["old_log_probs"], -1.0)
    data, _ = apply_kl_penalty(data, core_algos.get_kl_controller(config.kl_ctrl))
    rewards = data.batch["token_level_rewards"].sum(dim=1)
    # 0.001 for each trainable token: 2, 4 and 1 of them.
    assert rewards[1:4].tolist() == pytest.approx([-0.002, -0.004, -0.001])


# The last row of rollout 1 is masked, as rejection sampling or a truncation leaves it.
MASKED_LAST: list[Rollout] = [ROLLOUTS[0], ("p", 1, 0.0, [[1, 1], [0, 1, 1, 1, 1], [0]]), *ROLLOUTS[2:]]


@needs_v1
def test_the_multi_trajectory_path_zeroes_a_rollout_whose_last_row_is_masked() -> None:
    """Its advantage is read off the first trainable token of the last row, and there is none."""
    assert of_trajectories(MASKED_LAST, "grpo")[:4] == [0.5, 0.0, 0.0, 0.0]
    assert of_trajectories(MASKED_LAST, "miles_norm")[:4] == [0.5, -0.5, -0.5, 0.0]


@needs_v1
def test_the_multi_trajectory_path_knows_rollouts_for_grpo_only() -> None:
    distances = [0.5, -0.5, -0.5, -0.5, 0.0, 0.0, -0.25, -0.25, 0.25]
    assert of_trajectories(ROLLOUTS, "grpo") == pytest.approx(distances)
    # rloo: 1 against the mean of 0, 0, 0, 0.5, 0.5 is 0.8; against rollouts 0 and 0.5 it is 0.75.
    assert of_trajectories(ROLLOUTS, "rloo")[0] == pytest.approx(0.8)
    rloo = trainer_config("+algorithm.miles_norm.normalization.advantage_estimator=rloo").algorithm
    assert of_trajectories(ROLLOUTS, "miles_norm", config=rloo)[0] == pytest.approx(0.75)


@needs_v1
def test_sessions_are_rollouts_whatever_the_order_of_rows() -> None:
    distances = [0.5, -0.5, -0.5, -0.5, 0.0, 0.0, -0.25, -0.25, 0.25]
    assert of_trajectories(ROLLOUTS, "miles_norm") == distances
    backwards = [(*rollout[:3], rollout[3][::-1]) for rollout in ROLLOUTS[::-1]]
    assert of_trajectories(backwards, "miles_norm") == distances[::-1]
    weights = [1 / 15, *[1 / 35] * 3, *[1 / 25] * 2, *[1 / 40] * 2, 1 / 10]
    mode = "actor_rollout_ref.actor.policy_loss.loss_mode=miles_norm_weighted"
    weighted = of_trajectories(ROLLOUTS, "miles_norm_weighted", config=trainer_config(DR_GRPO, mode).algorithm)
    assert weighted == pytest.approx([w * d for w, d in zip(weights, distances, strict=True)], rel=1e-6)


@needs_v1
@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (["p_0", *keys_of(ROLLOUTS)[1:]], r"(?s)keys of row 0.*'p_0' with uid 'p'"),
        ([*keys_of(ROLLOUTS)[:8], "p_1_0"], r"(?s)keys of row 8.*'p_1_0' with uid 'q'"),
        (["p_0_x", *keys_of(ROLLOUTS)[1:]], "keys of row 0"),
    ],
)
def test_keys_that_do_not_fit_the_rows_are_refused(keys: list[str], match: str) -> None:
    with pytest.raises(SampleError, match=match):
        of_trajectories(ROLLOUTS, "miles_norm", batch_keys=keys)
    assert of_trajectories(ROLLOUTS, "rloo", batch_keys=keys)  # verl's own estimators are left alone


# The step of the v1 trainer with its real store, in a process that loads us as a training run does.
STEP = """
import sys
from types import SimpleNamespace
import ray, torch, verl
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

settings = {"include_dashboard": False, "object_store_memory": 512 * 2**20, "log_to_driver": False}
ray.init(num_cpus=8, _temp_dir=sys.argv[1], **settings)
tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
rewards = {"p_0_0": [0, 0, 1.0], "p_0_1": [0, 1.0], "p_1_0": [0, 0, 0, 0.0]}
fields = [
    {"uid": "p", "response_mask": torch.ones(len(row), dtype=torch.int64), "rm_scores": torch.tensor(row)}
    for row in rewards.values()
]
keys = list(rewards)
rows = list_of_dict_to_tensordict(fields)
tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=[{"status": "success"} for _ in keys])
algorithm = {"adv_estimator": "miles_norm", "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0}
algorithm["norm_adv_by_std_in_grpo"] = False
config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 2}}})
batch = tq.KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})
stored = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])["advantages"]
print([row.tolist() for row in stored.unbind()])
ray.shutdown()
"""


@needs_v1
@pytest.mark.ray
def test_a_step_of_the_v1_trainer() -> None:
    """Two rows of the success count once: the mean is 0.5, and not 2/3."""
    environment = {"VERL_USE_EXTERNAL_MODULES": "miles_norm.integrations.verl_v1"}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # nothing is written elsewhere
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # short, for the names of sockets are
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STEP, folder],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert run.stdout.splitlines()[-1:] == ["[[0.5, 0.5, 0.5], [0.5, 0.5], [-0.5, -0.5, -0.5, -0.5]]"], run.stderr


@needs_v1
@pytest.mark.parametrize(
    ("keys", "uids", "match"),
    [
        (["p_0_0"], ["p", "p"], "keys\n  got:      1 keys beside 2 uids"),
        (None, ["p"], "keys\n  got:      none keys beside 1 uids"),
        (["p_0_0", "q_0_0", 7, "p0"], ["p"] * 4, "keys of rows 1, 2, 3\n"),
        (["p_0_0"], [["p"]], "keys of row 0\n"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: Any, uids: Any, match: str) -> None:
    from miles_norm.integrations.verl_v1 import session_uids

    with pytest.raises(SampleError, match=match):
        session_uids(keys, uids)
