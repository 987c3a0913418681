"""Loss weights in verl, through its own ``compute_advantage``, ``agg_loss``, policy losses and ``ppo_loss``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from verl_rows import (
    ROLLOUTS,
    V1,
    AlgoConfig,
    TensorDict,
    advantages_of,
    core_algos,
    data_proto,
    of_rows,
    omega_conf_to_dataclass,
    ppo_loss,
    trainer_config,
)

from miles_norm.errors import ConfigError, SampleError
from miles_norm.integrations.verl import weighted_policy_loss
from miles_norm.integrations.verl_config import SUMMED_LOSSES

pytestmark = pytest.mark.integration

ACTOR = "actor_rollout_ref.actor"
OURS = f"{ACTOR}.policy_loss.loss_mode=miles_norm_weighted"
DR_GRPO = "+algorithm.miles_norm.normalization.advantage_estimator=dr_grpo"
ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=3"  # of 3 rollouts: 9 rows
# Five rollouts of 3, 7, 5, 8 and 2 tokens with these distances from the mean of their prompt.
WEIGHTS = [1 / 15, *[1 / 35] * 3, *[1 / 25] * 2, *[1 / 40] * 2, 1 / 10]
DISTANCES = [0.5, -0.5, -0.5, -0.5, 0.0, 0.0, -0.25, -0.25, 0.25]
needs_token_sum = pytest.mark.skipif(not V1, reason="verl 0.8.0 has no token-sum")


def log_probs(shape: tuple[int, ...], spread: float = 0.4) -> tuple[Tensor, Tensor]:
    """Old and new ``[N, T]``; ratios reach beyond the clip on both sides."""
    position = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
    old = -1.0 - 0.5 * torch.sin(position)
    return old, (old + spread * torch.cos(1.7 * position)).requires_grad_()


def mean_over_rollouts(old: Tensor, new: Tensor, mask: Tensor) -> Tensor:
    """Rollouts, their tokens and the clip, one after the other."""
    total, row = new.new_zeros(()), 0
    for _, _, _, masks in ROLLOUTS:
        losses = []
        for _ in masks:
            for t in torch.nonzero(mask[row])[:, 0].tolist():
                ratio = (new[row, t] - old[row, t]).exp()
                losses.append(-torch.minimum(ratio * DISTANCES[row], ratio.clamp(0.8, 1.2) * DISTANCES[row]))
            row += 1
        total = total + torch.stack(losses).mean() / len(ROLLOUTS)
    return total


def actor(*overrides: str) -> Any:
    config = omega_conf_to_dataclass(trainer_config(ONE_UPDATE, OURS, *overrides).actor_rollout_ref.actor)
    config.global_batch_info.clear()
    return config


def weighted(*overrides: str) -> tuple[Tensor, Tensor]:
    """Advantages and mask ``[N, T]``."""
    data = data_proto()
    config = trainer_config(ONE_UPDATE, OURS, DR_GRPO, *overrides).algorithm
    return advantages_of(data, "miles_norm_weighted", config).double(), data.batch["response_mask"]


def check_same(of: Callable[[Tensor, Tensor], Tensor], mask: Tensor) -> None:
    """The value and the gradient are those of the mean over rollouts."""
    old, new = log_probs(tuple(mask.shape))
    expected = mean_over_rollouts(old, new, mask)
    (gradient,) = torch.autograd.grad(expected, new)
    loss = of(old, new)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], gradient, rtol=1e-6, atol=1e-9)
    assert torch.count_nonzero(gradient) > 10


def test_advantages_carry_the_weights() -> None:
    advantages, mask = weighted()
    expected = [w * d for w, d in zip(WEIGHTS, DISTANCES, strict=True)]
    assert of_rows(advantages, mask) == pytest.approx(expected, rel=1e-6)


def test_our_loss_is_the_mean_over_rollouts() -> None:
    advantages, mask = weighted()
    for mode in ("token-mean", "seq-mean-token-mean"):  # left to KL and entropy
        check_same(lambda old, new, mode=mode: weighted_policy_loss(old, new, advantages, mask, mode, actor())[0], mask)


def test_agg_loss_of_verl_sums() -> None:
    """token-sum; without it the mean over one sequence of the sums over tokens."""
    advantages, mask = weighted()

    def loss(old: Tensor, new: Tensor) -> Tensor:
        ratio = (new - old).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if V1:
            return core_algos.agg_loss(losses, mask.double(), "token-sum")
        return core_algos.agg_loss(losses, mask.double(), "seq-mean-token-sum", global_batch_size=1)

    check_same(loss, mask)


@needs_token_sum
def test_vanilla_with_token_sum_is_the_same() -> None:
    overrides = f"{ACTOR}.policy_loss.loss_mode=vanilla", f"{ACTOR}.loss_agg_mode=token-sum"
    advantages, mask = weighted(*overrides)
    vanilla = core_algos.get_policy_loss_fn("vanilla")
    config = actor(*overrides)
    check_same(lambda old, new: vanilla(old, new, advantages, mask.double(), "token-sum", config)[0], mask)


def test_metrics_and_clips_are_those_of_vanilla() -> None:
    advantages, mask = weighted()
    config = actor(f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.clip_ratio_c=1.2")
    config.global_batch_info.update(dp_size=4, global_batch_size=1)
    old, new = log_probs(tuple(mask.shape))
    ours, metrics = core_algos.get_policy_loss_fn("miles_norm_weighted")(
        old, new, advantages, mask, loss_agg_mode="token-mean", config=config
    )
    theirs, expected = core_algos.compute_policy_loss_vanilla(
        old, new, advantages, mask.double(), "seq-mean-token-sum", config
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert min(metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]) > 0


def test_micro_batches_and_ranks_add_up() -> None:
    """Two ranks of three micro-batches each; gradients are averaged over ranks."""
    advantages, mask = weighted()
    config = actor()
    config.global_batch_info["dp_size"] = 2
    parts = [[[8, 0], [3], [5, 1]], [[2, 7], [4], [6]]]

    def loss(old: Tensor, new: Tensor) -> Tensor:
        of_ranks = [
            sum(weighted_policy_loss(old[n], new[n], advantages[n], mask[n], config=config)[0] for n in micro_batches)
            for micro_batches in parts
        ]
        return torch.stack(of_ranks).mean()

    check_same(loss, mask)


def test_importance_weights_of_the_rollout_multiply_token_losses() -> None:
    advantages, mask = weighted()
    old, new = log_probs(tuple(mask.shape), spread=0.0)
    given = torch.where(mask != 0, torch.arange(mask.numel()).view(mask.shape).double(), torch.nan)
    loss = weighted_policy_loss(old, new, advantages, mask, config=actor(), rollout_is_weights=given)[0]
    torch.testing.assert_close(loss, -(advantages * torch.nan_to_num(given)).sum())


@needs_token_sum
@pytest.mark.parametrize("name", sorted(set(core_algos.POLICY_LOSS_REGISTRY) - {"miles_norm_weighted", "bypass_mode"}))
def test_which_losses_of_verl_take_weighted_advantages(name: str) -> None:
    """Those where a row weighs as much as its advantage is multiplied by, and which add up rows."""
    _, mask = weighted()
    mask = mask.double()
    old, new = log_probs(tuple(mask.shape), spread=0.2)
    advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)[:, None] * mask
    weights = torch.linspace(0.1, 2, len(mask), dtype=torch.float64)
    settings = {"loss_mode": name, "dro_beta": 0.1, "clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.3}
    config = actor(*(f"{ACTOR}.policy_loss.{key}={value}" for key, value in settings.items()))
    torch.manual_seed(0)  # clip_cov draws tokens
    loss = core_algos.get_policy_loss_fn(name)
    scaled = loss(old, new, advantages * weights[:, None], mask, "token-sum", config)[0]
    row_by_row = sum(
        weights[n]
        * loss(old[n : n + 1], new[n : n + 1], advantages[n : n + 1], mask[n : n + 1], "token-sum", config)[0]
        for n in range(len(mask))
    )
    assert torch.allclose(scaled, row_by_row, rtol=1e-9) == (name in SUMMED_LOSSES)


def test_an_update_weighs_as_much_as_a_batch_of_one() -> None:
    """9 rows in updates of 3 rows: K is 3. With K = 1 the masses of all updates add up to that of one."""
    base = of_rows(*weighted())
    smaller = of_rows(*weighted(f"{ACTOR}.ppo_mini_batch_size=1"))
    assert smaller == pytest.approx([3 * value for value in base], rel=1e-6)
    scope = "+algorithm.miles_norm.loss.scope=batch"
    assert of_rows(*weighted(f"{ACTOR}.ppo_mini_batch_size=1", scope)) == base
    # A nominal number counts an update, however many there are.
    nominal = ["+algorithm.miles_norm.loss.divisor=nominal_rollouts", "+algorithm.miles_norm.loss.nominal_rollouts=5"]
    assert of_rows(*weighted(f"{ACTOR}.ppo_mini_batch_size=1", *nominal)) == base
    data = data_proto()
    alone = AlgoConfig(norm_adv_by_std_in_grpo=False)
    assert of_rows(advantages_of(data, "miles_norm_weighted", alone).double(), data.batch["response_mask"]) == base


def test_the_aggregation_is_a_setting() -> None:
    """Tokens weigh alike: 25 of them."""
    advantages, mask = weighted("+algorithm.miles_norm.loss.aggregation=token_mean")
    assert of_rows(advantages, mask) == pytest.approx([value / 25 for value in DISTANCES], rel=1e-6)


def test_verl_adds_kl_and_entropy_as_means() -> None:
    """The loss function of verl's workers, on nested tensors; KL and entropy follow loss_agg_mode."""
    advantages, mask = weighted()
    old, new = log_probs(tuple(mask.shape))
    lengths = [len(row) for *_, masks in ROLLOUTS for row in masks]
    config = actor(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl", f"{ACTOR}.entropy_coeff=0.5")

    def nested(rows: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([rows[n, :t] for n, t in enumerate(lengths)], layout=torch.jagged)

    def of_model(rows: Tensor) -> Tensor:
        """One token of prompt; log-probs are shifted by one to the left."""
        padded = [torch.cat([rows[n, :t], rows.new_zeros(1)]) for n, t in enumerate(lengths)]
        return torch.nested.as_nested_tensor(padded, layout=torch.jagged)

    fields = {"response_mask": mask, "old_log_probs": old, "advantages": advantages, "ref_log_prob": old}
    data = TensorDict({name: nested(rows) for name, rows in fields.items()}, batch_size=len(mask))
    data["prompts"] = torch.nested.as_nested_tensor([torch.zeros(1)] * len(mask), layout=torch.jagged)
    data["responses"] = nested(old)
    counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 9}
    for name, count in counts.items():
        data.set_non_tensor(name, count)
    entropy = torch.full(mask.shape, 2.0, dtype=torch.float64)
    loss, metrics = ppo_loss(config, {"log_probs": of_model(new), "entropy": of_model(entropy)}, data)
    kl = ((new - old) * mask).sum() / 25
    policy = mean_over_rollouts(old, new, mask)
    torch.testing.assert_close(loss, policy - 0.5 * 2.0 + config.kl_loss_coef * kl, rtol=1e-6, atol=1e-9)
    assert "kl_loss" in metrics


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ([f"{ACTOR}.policy_loss.loss_mode=vanilla"], "(?s)got: +vanilla with loss_agg_mode=token-mean.*be added up"),
        ([f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{ACTOR}.loss_agg_mode=token-sum"], "got: +geo_mean"),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
            "got: +gspo with loss_agg_mode=seq-mean-token-sum-norm",
        ),
        (
            [f"{ACTOR}.loss_agg_mode=token-sum", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.1"],
            "(?s)token-sum with use_kl_loss and entropy_coeff.*grows with the tokens",
        ),
        (["algorithm.use_kl_in_reward=True"], "siblings differ"),
        (["+algorithm.miles_norm.loss.aggregation=constant"], "without max_tokens"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        weighted(*overrides)


@pytest.mark.parametrize(
    ("factors", "match"),
    [
        (torch.ones(1, 6), "weights\n"),  # would be stretched over the rows
        (torch.ones(6), "weights\n"),
        ([1.0] * 6, "weights\n"),
        (torch.full((3, 6), torch.nan), "weights of rows 0, 1, 2"),
        (-torch.ones(3, 6), "weights of rows 0, 1, 2"),
    ],
)
def test_importance_weights_are_one_per_token(factors: Any, match: str) -> None:
    tokens, mask = -torch.ones(3, 6), torch.ones(3, 6)
    with pytest.raises(SampleError, match=match):
        weighted_policy_loss(tokens, tokens, tokens, mask, config=actor(), rollout_is_weights=factors)


@pytest.mark.parametrize("config", [None, {}, "actor", 3])
def test_another_config_than_the_actors_is_refused(config: Any) -> None:
    tokens = -torch.ones(3, 6)
    with pytest.raises(ConfigError, match="expected: verl's ActorConfig"):
        weighted_policy_loss(tokens, tokens, tokens, torch.ones(3, 6), config=config)
