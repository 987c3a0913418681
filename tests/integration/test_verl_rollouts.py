"""The estimators of ``miles_norm.integrations.verl`` through verl's own ``compute_advantage`` on its own DataProto."""

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from verl_rows import ROLLOUTS, V1, AlgoConfig, advantages_of, data_proto, of_rows, trainer_config, verl

from miles_norm.errors import ConfigError, MilesNormError, MissingRewardError, SampleError
from miles_norm.integrations.verl import RolloutUid, rollout_advantages, rollout_uids, weighted_advantages

pytestmark = pytest.mark.integration

OURS = "+algorithm.miles_norm"
DR_GRPO = f"{OURS}.normalization.advantage_estimator=dr_grpo"
# p: mean of 1, 0, 0.5 is 0.5; q: mean of 0.25, 0.75 is 0.5. Rows: 1, 3, 2 and 2, 1.
DISTANCES = [0.5, -0.5, -0.5, -0.5, 0.0, 0.0, -0.25, -0.25, 0.25]


def rows_of(estimator: str, *overrides: str, data: Any = None) -> list[float]:
    data = data or data_proto()
    return of_rows(advantages_of(data, estimator, trainer_config(*overrides).algorithm), data.batch["response_mask"])


@pytest.mark.parametrize(
    ("environment", "registered"),
    [
        ({}, V1),  # verl 0.8.0 looks for no entry points
        ({"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "miles_norm.integrations.verl"}, True),
    ],
    ids=["entry point", "external module"],
)
def test_importing_verl_registers_the_names(environment: dict[str, str], registered: bool) -> None:
    code = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as a, POLICY_LOSS_REGISTRY as p\n"
        "print({'miles_norm', 'miles_norm_weighted'} <= set(a), 'miles_norm_weighted' in p)"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.split() == [str(registered)] * 2


def test_a_rollout_counts_once() -> None:
    assert rows_of("miles_norm", DR_GRPO) == DISTANCES


def test_the_deviation_is_that_of_rollouts() -> None:
    """p: deviation of 1, 0, 0.5 is 0.5; q: of 0.25, 0.75 it is sqrt(0.125)."""
    expected = [d / (s + 1e-6) for d, s in zip(DISTANCES, [0.5] * 6 + [0.125**0.5] * 3, strict=True)]
    assert rows_of("miles_norm") == pytest.approx(expected, rel=1e-6)
    assert rows_of("miles_norm", "algorithm.norm_adv_by_std_in_grpo=False") == DISTANCES


def test_returns_are_the_advantages() -> None:
    data = data_proto()
    advantages_of(data, "miles_norm", trainer_config().algorithm)
    assert torch.equal(data.batch["returns"], data.batch["advantages"])
    assert data.batch["advantages"].dtype == torch.float32


def test_the_config_may_be_the_dataclass_of_verl() -> None:
    data = data_proto()
    config = AlgoConfig(adv_estimator="miles_norm", norm_adv_by_std_in_grpo=False)
    assert of_rows(advantages_of(data, "miles_norm", config), data.batch["response_mask"]) == DISTANCES


def test_uids_survive_what_verl_does_with_rows() -> None:
    data = data_proto()
    data.reorder(torch.tensor([8, 3, 0, 5, 1, 7, 2, 6, 4]))
    data = verl.DataProto.concat([data.select_idxs(list(range(4))), data[4:9]])
    data = pickle.loads(pickle.dumps(data))
    data = verl.DataProto.concat(data.chunk(3))
    order = data.batch["row"].tolist()
    assert order != sorted(order)
    assert rows_of("miles_norm", DR_GRPO, data=data) == [DISTANCES[row] for row in order]


def test_uids_are_those_of_the_prompts_to_verl() -> None:
    with_ids, plain = data_proto(), data_proto(with_ids=False)
    for name in ("grpo", "rloo", "opo"):
        ours, theirs = (advantages_of(data, name, AlgoConfig()) for data in (with_ids, plain))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert set(with_ids.non_tensor_batch["uid"]) == {"p", "q"}


def test_rows_that_fill_a_batch_enter_nothing() -> None:
    """verl gives them a uid of their own, no trainable token, and the reward 0."""
    pad = "pad" + "0" * 32
    filled = [*ROLLOUTS, (pad, 0, 0.0, [[0]]), (pad, 1, 0.0, [[0]])]
    assert rows_of("miles_norm", DR_GRPO, data=data_proto(filled)) == [*DISTANCES, 0.0, 0.0]
    plain = advantages_of(data_proto(), "miles_norm_weighted", AlgoConfig())
    assert torch.equal(advantages_of(data_proto(filled), "miles_norm_weighted", AlgoConfig())[:9], plain)


def test_which_sibling_speaks_is_a_setting() -> None:
    """Rollout 1 of p: its rows have 2, 4 and 1 trainable tokens."""
    data = data_proto()
    data.batch["token_level_rewards"][2, 4] = 0.25
    with_max = f"{OURS}.normalization.rollout_reward=max"
    # Mean of 1, 0.25, 0.5 is 7/12, whichever rule takes the 0.25.
    expected = pytest.approx([5 / 12, -1 / 3, -1 / 3, -1 / 3, -1 / 12, -1 / 12, *DISTANCES[6:]])
    assert rows_of("miles_norm", DR_GRPO, data=data) == expected
    assert rows_of("miles_norm", DR_GRPO, with_max, data=data) == expected
    assert rows_of("miles_norm", DR_GRPO, f"{OURS}.normalization.rollout_reward=last", data=data) == DISTANCES
    with pytest.raises(MilesNormError, match=r"rollout \('p', 1\)"):
        rows_of("miles_norm", f"{OURS}.normalization.rollout_reward=shared", data=data)


def test_a_reward_that_is_nan_is_named() -> None:
    data = data_proto()
    data.batch["token_level_rewards"][0, 0] = torch.nan
    with pytest.raises(MissingRewardError, match="row 0"):
        rows_of("miles_norm", data=data)
    excluded = rows_of("miles_norm", DR_GRPO, f"{OURS}.normalization.missing_reward=exclude", data=data)
    assert excluded == [0.0, -0.25, -0.25, -0.25, 0.25, 0.25, *DISTANCES[6:]]


WRONG_SETTINGS = [
    (["algorithm.use_kl_in_reward=True"], r"(?s)use_kl_in_reward.*siblings differ.*use_kl_loss=True"),
    ([f"{OURS}.normalisation.device=cpu"], r"(?s)algorithm\.miles_norm\n.*got: +normalisation\n"),
    ([f"{OURS}=rloo"], r"(?s)got: +'rloo'"),
    ([f"{OURS}.normalization=rloo"], r"(?s)got: +normalization='rloo'\n.*expected: the mappings"),
    ([f"{OURS}.normalization.n_samples_per_prompt=true"], "n_samples_per_prompt=True with actor_rollout_ref"),
    ([f"{OURS}.normalization.advantage_estimator=grop"], r"advantage_estimator='grop'"),
    ([f"{OURS}.normalization.advantage_estimator=ppo"], r"(?s)advantage_estimator=ppo.*computes nothing after"),
    (
        [
            f"{OURS}.normalization.advantage_estimator=gdpo",
            f"{OURS}.normalization.options.gdpo_components=[a]",
        ],
        "no components",
    ),
    ([f"{OURS}.normalization.truncated_rollouts=untrain"], "not told which rows ended by length"),
    ([f"{OURS}.normalization.n_samples_per_prompt=4"], r"n_samples_per_prompt=4 with actor_rollout_ref\.rollout\.n=3"),
    (
        [f"{OURS}.normalization.grpo_std_normalization=False"],
        r"grpo_std_normalization=False with algorithm\.norm_adv_by_std_in_grpo=True",
    ),
    (
        ["actor_rollout_ref.actor.policy_loss.loss_mode=miles_norm_weighted"],
        r"(?s)got: +miles_norm\n.*expected: miles_norm_weighted",
    ),
]


@pytest.mark.parametrize(("overrides", "match"), WRONG_SETTINGS)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rows_of("miles_norm", *overrides)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("response_mask", torch.full((9, 6), 2), "response_mask of rows 0, 1, 2"),
        ("response_mask", torch.ones(9, 5), "token_level_rewards\n"),
        ("token_level_rewards", torch.ones(9), "token_level_rewards\n"),
        ("token_level_rewards", torch.ones(9, 1), "token_level_rewards\n"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, value: torch.Tensor, match: str) -> None:
    tensors = {"token_level_rewards": torch.ones(9, 6), "response_mask": torch.ones(9, 6), name: value}
    for estimator in (rollout_advantages, weighted_advantages):
        with pytest.raises(SampleError, match=match):
            estimator(**tensors, index=data_proto().non_tensor_batch["uid"])


def test_uids_that_do_not_fit_are_refused() -> None:
    tensors = {"token_level_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)}
    for uids in ("pp", ["p"], [["p"], ["p"]], 7):
        with pytest.raises(SampleError, match="uid"):
            rollout_advantages(**tensors, index=uids)
    with pytest.raises(ConfigError, match=r"expected: verl's config\.algorithm"):
        rollout_advantages(**tensors, index=["p", "p"], config="grpo")


def test_lost_rollout_ids_are_noticed() -> None:
    with pytest.raises(SampleError, match=r"(?s)rows 0, 1, 2, 3, 4, 5.*up to 6 rows.*rollout\.n=3.*verl_v1"):
        rows_of("miles_norm", data=data_proto(with_ids=False))
    half = data_proto()
    half.non_tensor_batch["uid"] = np.array([*half.non_tensor_batch["uid"][:7], "q", "q"], dtype=object)
    with pytest.raises(SampleError, match="rows 7, 8") as caught:
        rows_of("miles_norm", data=half)
    assert caught.value.rows == (7, 8)


def test_no_uids_are_an_error() -> None:
    data = data_proto()
    del data.non_tensor_batch["uid"]
    with pytest.raises(SampleError, match="rollout_uids"):
        advantages_of(data, "miles_norm", AlgoConfig())


def test_plain_uids_are_rollouts_of_one_row(caplog: pytest.LogCaptureFixture) -> None:
    data = data_proto([("p", k, reward, [[1, 1]]) for k, reward in enumerate([1.0, 0.0, 0.5])], with_ids=False)
    assert rows_of("miles_norm", DR_GRPO, data=data) == [0.5, -0.5, 0.0]
    assert not caplog.records
    # Without the trainer's config there is nothing to compare the number of rows with.
    for _ in range(2):
        advantages_of(data, "miles_norm", AlgoConfig())
    assert [record.message[:40] for record in caplog.records] == ["the uids name no rollouts, and rollout.n"]


def test_a_rollout_uid_is_a_string() -> None:
    uid = RolloutUid("9f2c", ("session", 3))
    copy = pickle.loads(pickle.dumps(uid))
    assert (copy, hash(copy), copy.rollout, type(copy)) == ("9f2c", hash("9f2c"), ("session", 3), RolloutUid)
    # Tensors hash by identity, and would be a rollout each; a row without an id is one.
    assert [uid.rollout for uid in rollout_uids(["p"] * 2, torch.tensor([3, 3]))] == [3, 3]
    lone = data_proto([("p", None, reward, [[1]]) for reward in (1.0, 0.0, 0.5)])
    assert rows_of("miles_norm", DR_GRPO, data=lone) == [0.5, -0.5, 0.0]
