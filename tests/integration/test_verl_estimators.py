"""Our advantages against those that verl 0.9.1 computes itself, on rollouts of one row each: what verl supports.

Every difference that a test states stands in docs/semantics.md, "Differences from upstream".
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl_rows import V1, core_algos

from miles_norm import NormalizationConfig, normalize_rewards
from miles_norm.config import EstimatorOptions

pytestmark = pytest.mark.integration

Row = dict[str, Any]
WIDTH = 12
# Groups of different sizes, none of one: there verl has another rule, which has a test of its own.
SIZES = (2, 3, 4, 8, 5)
BY_TOKEN = EstimatorOptions(whitening="token", whitening_shift=True)


def random_rows(seed: int, rewards: str = "real") -> list[Row]:
    """Rollouts of one row each, masks with holes, group ids in no order."""
    rng = np.random.default_rng(seed)
    rows = []
    for rollout, group in enumerate(rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES)).tolist()):
        mask = rng.integers(0, 2, int(rng.integers(1, WIDTH + 1)))
        mask[-1] = 1
        reward = float(rng.integers(0, 2)) if rewards == "binary" else round(float(rng.normal()), 2)
        rows.append({"group_index": group, "index": rollout, "reward": reward, "loss_mask": mask.tolist()})
    return rows


def tensors_of(rows: list[Row], rewards: list[float] | None = None) -> dict[str, Any]:
    """verl's arguments: the reward on the last token of the response, masks padded on the right."""
    scores, masks = torch.zeros(len(rows), WIDTH), torch.zeros(len(rows), WIDTH)
    for n, row in enumerate(rows):
        length = len(row["loss_mask"])
        masks[n, :length] = torch.tensor(row["loss_mask"], dtype=torch.float32)
        scores[n, max(length - 1, 0)] = row["reward"] if rewards is None else rewards[n]
    uids = np.array([f"prompt {row['group_index']}" for row in rows], dtype=object)
    return {"token_level_rewards": scores, "response_mask": masks, "index": uids}


def of_verl(name: str, rows: list[Row], **arguments: Any) -> Tensor:
    """Advantages ``[N, T]``, by the function that verl's trainer looks up under this name."""
    return core_algos.get_adv_estimator_fn(name)(**{**tensors_of(rows), **arguments})[0]


def of_ours(rows: list[Row], estimator: str, **settings: Any) -> Tensor:
    result = normalize_rewards(rows, NormalizationConfig(advantage_estimator=estimator, **settings))
    masks = tensors_of([dict(row, reward=0.0) for row in rows])["response_mask"]
    return result.token_advantages(masks)


def check_same(ours: Tensor, verl: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert ours.shape == verl.shape
    assert torch.count_nonzero(ours) > 0
    torch.testing.assert_close(ours, verl, rtol=rtol, atol=atol)


SEEDS = pytest.mark.parametrize("seed", range(5))
SAME = [
    ("grpo", {}, "grpo", {}),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, "grpo", {"grpo_std_normalization": False}),
    ("grpo", {"norm_adv_by_std_in_grpo": False}, "dr_grpo", {}),
    ("grpo_vectorized", {}, "grpo", {}),
    ("rloo", {}, "rloo", {}),
    ("rloo_vectorized", {}, "rloo", {}),
    ("opo", {}, "opo", {}),
    ("grpo_passk", {"config": {"norm_adv_by_std_in_grpo": False}}, "pass_at_k", {}),
    ("reinforce_plus_plus_baseline", {}, "reinforce_plus_plus_baseline", {"options": BY_TOKEN}),
]


@SEEDS
@pytest.mark.parametrize(("theirs", "arguments", "ours", "settings"), SAME)
def test_same_on_one_row_rollouts(
    theirs: str, arguments: dict[str, Any], ours: str, settings: dict[str, Any], seed: int
) -> None:
    rows = random_rows(seed)
    check_same(of_ours(rows, ours, **settings), of_verl(theirs, rows, **arguments))


def test_every_estimator_that_both_have_is_compared() -> None:
    both = {name for name in core_algos.ADV_ESTIMATOR_REGISTRY if not name.startswith("miles_norm")}
    compared = {name for name, *_ in SAME} | {"gdpo", "reinforce_plus_plus"}
    # gae, remax, gpg and the optimal token baselines need values, greedy rollouts, counts of zeros or logits.
    assert both - compared == {"gae", "remax", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"}
    assert compared <= both


@SEEDS
@pytest.mark.skipif(not V1, reason="in verl 0.8.0 returns end at a masked token")
def test_rewards_pass_through_reinforce_plus_plus(seed: int) -> None:
    """verl's returns without discount, before it whitens them over the batch."""
    rows = random_rows(seed)
    tensors = tensors_of(rows)
    config = type("Undiscounted", (), {"gamma": 1.0})
    estimator = core_algos.get_adv_estimator_fn("reinforce_plus_plus")
    returns = estimator(tensors["token_level_rewards"], tensors["response_mask"], config=config)[1]
    check_same(of_ours(rows, "reinforce_plus_plus"), returns)


def gdpo_of_verl(rows: list[Row], weights: list[float] | None) -> Tensor:
    config = {"gdpo_reward_keys": ["right", "short"], "gdpo_reward_weights": weights}
    tensors = tensors_of(rows, [0.0] * len(rows))
    attention = torch.zeros(len(rows), WIDTH + 1, dtype=torch.int64)
    for n, row in enumerate(rows):
        attention[n, : len(row["loss_mask"]) + 1] = 1
    return core_algos.get_adv_estimator_fn("gdpo")(
        **tensors,
        config=config,
        non_tensor_batch={name: np.array([row["reward"][name] for row in rows]) for name in ("right", "short")},
        batch={"prompts": torch.zeros(len(rows), 1), "attention_mask": attention},
    )[0]


def gdpo_options(weights: list[float] | None, **settings: Any) -> EstimatorOptions:
    return EstimatorOptions(gdpo_components=("right", "short"), gdpo_weights=tuple(weights or ()), **settings)


@SEEDS
@pytest.mark.parametrize("weights", [None, [2.0, 0.5]])
def test_gdpo(weights: list[float] | None, seed: int) -> None:
    """verl whitens over tokens and shifts; ours divides by the deviation over rollouts before, which cancels."""
    rows = random_rows(seed)
    binary = random_rows(seed, "binary")
    for row, other in zip(rows, binary, strict=True):
        row["reward"] = {"right": other["reward"], "short": row["reward"]}
    options = gdpo_options(weights, whitening="token", whitening_shift=True)
    check_same(of_ours(rows, "gdpo", options=options), gdpo_of_verl(rows, weights), rtol=2e-5, atol=5e-6)


# What differs, measured.


def two_tokens(rewards: list[Any], groups: list[int]) -> list[Row]:
    return [
        {"group_index": g, "index": n, "reward": r, "loss_mask": [1, 1]}
        for n, (r, g) in enumerate(zip(rewards, groups, strict=True))
    ]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "opo"])
def test_group_of_one_keeps_its_reward_in_verl(name: str) -> None:
    rows = two_tokens([3.0, 1.0, 0.0], [0, 1, 1])
    estimator = "grpo" if name == "grpo_vectorized" else name
    # grpo divides it by 1 + epsilon.
    assert of_verl(name, rows)[0, 0].item() == pytest.approx(3.0, rel=2e-6)
    assert of_ours(rows, estimator)[0].tolist() == [0.0] * WIDTH
    check_same(of_ours(rows, estimator, singleton="raw"), of_verl(name, rows), rtol=2e-6)


def test_group_of_one_is_zero_in_the_vectorized_rloo_of_verl() -> None:
    rows = two_tokens([3.0, 1.0, 0.0], [0, 1, 1])
    check_same(of_ours(rows, "rloo"), of_verl("rloo_vectorized", rows))


def test_group_of_one_is_an_error_in_pass_at_k_of_verl() -> None:
    rows = two_tokens([3.0, 1.0, 0.0], [0, 1, 1])
    with pytest.raises(ValueError, match="Pass@k requires at least 2 samples"):
        of_verl("grpo_passk", rows, config={})
    assert of_ours(rows, "pass_at_k")[:, 0].tolist() == [0.0, 1.0, 0.0]


def test_pass_at_k_is_divided_by_the_deviation_in_verl() -> None:
    """Rewards 3, 1, 1: lead 2, deviation 2 / sqrt(3)."""
    rows = two_tokens([3.0, 1.0, 1.0], [0, 0, 0])
    assert of_verl("grpo_passk", rows, config={})[:, 0].tolist() == pytest.approx([3**0.5, 0.0, 0.0], rel=1e-5)
    assert of_ours(rows, "pass_at_k")[:, 0].tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo"])
def test_equal_rewards_leave_rounding_in_verl(name: str) -> None:
    rows = two_tokens([0.7] * 7, [0] * 7)
    residue = of_verl(name, rows)[:, 0].abs().max().item()
    # The division by a deviation of nearly nothing makes the rounding visible.
    low, high = (0.01, 1.0) if name.startswith("grpo") else (1e-8, 1e-6)
    assert low < residue < high
    assert torch.count_nonzero(of_ours(rows, name.removesuffix("_vectorized"))) == 0


def test_whitening_has_its_epsilon_under_the_root_in_verl() -> None:
    """Advantages +-a on four tokens each: verl a / sqrt(8/7 a^2 + 1e-8), ours a / (sqrt(8/7) a + 1e-6)."""
    rows = two_tokens([2e-4, 0.0, 2e-4, 0.0], [0, 0, 1, 1])
    theirs = of_verl("reinforce_plus_plus_baseline", rows)[0, 0].item()
    ours = of_ours(rows, "reinforce_plus_plus_baseline", options=BY_TOKEN)[0, 0].item()
    assert theirs == pytest.approx(1e-4 / (8 / 7 * 1e-8 + 1e-8) ** 0.5, rel=1e-5)
    assert ours == pytest.approx(1e-4 / ((8 / 7) ** 0.5 * 1e-4 + 1e-6), rel=1e-5)


def test_opo_without_a_trainable_token_is_nan_in_verl() -> None:
    rows = two_tokens([1.0, 0.0], [0, 0])
    rows = [dict(row, loss_mask=[0, 0]) for row in rows]
    assert torch.isnan(of_verl("opo", rows)).all()
    result = normalize_rewards(rows, NormalizationConfig(advantage_estimator="opo"))
    assert result.rollout_advantages.tolist() == [0.5, -0.5]


def test_rows_are_observations_in_verl() -> None:
    """A rollout of three rows counts three times: mean 1/4 instead of 1/2."""
    rows = two_tokens([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    for row in rows[1:]:
        row["index"] = 1
    theirs = of_verl("grpo", rows, norm_adv_by_std_in_grpo=False)
    assert theirs[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert of_ours(rows, "dr_grpo")[:, 0].tolist() == [0.5, -0.5, -0.5, -0.5]


def test_float32_loses_the_distance_of_large_rewards_in_verl() -> None:
    """2**24 + 1 is no float32."""
    rows = two_tokens([2.0**24 + 1, 2.0**24], [0, 0])
    assert torch.count_nonzero(of_verl("rloo", rows)) == 0
    assert of_ours(rows, "rloo")[:, 0].tolist() == [1.0, -1.0]
