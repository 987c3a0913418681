"""Our weights against verl 0.9.1's ``agg_loss``, and our policy losses against its own, on rows of one rollout each."""

from typing import Any

import pytest
import torch
from torch import Tensor
from verl_rows import V1, core_algos

from miles_norm import LossConfig
from miles_norm.loss import (
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    mask_loss_weights,
    reduce_token_losses,
    row_sequences,
)

pytestmark = pytest.mark.integration

ROWS, WIDTH = 9, 12
SEEDS = pytest.mark.parametrize("seed", range(5))
MODES = {
    "token-mean": LossConfig(aggregation="token_mean"),
    "seq-mean-token-mean": LossConfig(aggregation="sample_mean"),
    # Of rollouts of one row each with a token; its constant is the width of the padded batch unless it is told one.
    "seq-mean-token-sum-norm": LossConfig(aggregation="constant", max_tokens=WIDTH, count_empty_rollouts=False),
}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 2, (ROWS, WIDTH), generator=generator)
    mask[4] = 0  # a row without a trainable token
    values = torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    names = ("losses", "log_prob", "old_log_prob", "advantages")
    return dict(zip(names, values, strict=True)) | {"mask": mask}


def weigh(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Every row is a rollout of its own."""
    return reduce_token_losses(losses, mask_loss_weights(mask, list(range(len(mask))), MODES[mode]), mask)


@SEEDS
@pytest.mark.parametrize("mode", MODES)
def test_agg_loss(mode: str, seed: int) -> None:
    """verl adds 1e-8 to the tokens of a row in its mean over them."""
    given = batch(seed)
    theirs = core_algos.agg_loss(given["losses"], given["mask"].double(), mode)
    rtol = 1e-7 if mode == "seq-mean-token-mean" else 1e-12
    torch.testing.assert_close(weigh(given["losses"], given["mask"], mode), theirs, rtol=rtol, atol=1e-12)


@SEEDS
@pytest.mark.parametrize("mode", MODES)
def test_agg_loss_over_ranks(mode: str, seed: int) -> None:
    """With the counts of the whole batch, its loss of a rank is our sum times the factor of the averaging group."""
    given = batch(seed)
    losses, mask = given["losses"], given["mask"].double()
    weights = mask_loss_weights(given["mask"], list(range(ROWS)), MODES[mode])
    for rows in (slice(0, 4), slice(4, ROWS)):
        theirs = core_algos.agg_loss(
            losses[rows],
            mask[rows],
            mode,
            dp_size=2,
            batch_num_tokens=int(mask.sum()),
            global_batch_size=int((mask.sum(1) > 0).sum()),
        )
        ours = 2 * reduce_token_losses(losses[rows], weights[rows], given["mask"][rows])
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


@pytest.mark.skipif(not V1, reason="verl 0.8.0 has no token-sum")
def test_every_mode_of_agg_loss_is_known() -> None:
    given = batch(0)
    for mode in (*MODES, "token-sum", "seq-mean-token-sum"):  # these two have no mean of ours
        core_algos.agg_loss(given["losses"], given["mask"].double(), mode)
    with pytest.raises(ValueError, match="Invalid loss_agg_mode"):
        core_algos.agg_loss(given["losses"], given["mask"].double(), "prompt-mean")


def test_rows_are_rollouts_in_verl() -> None:
    """A rollout cut into two rows weighs twice in its mean over sequences, once in ours."""
    losses, mask = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3, 1)
    assert core_algos.agg_loss(losses, mask, "seq-mean-token-mean").item() == pytest.approx(2 / 3)
    ours = reduce_token_losses(losses, mask_loss_weights(mask, [0, 0, 1]), mask)
    assert ours.item() == pytest.approx(1 / 2)


def of_verl(name: str, given: dict[str, Tensor], **clips: float) -> tuple[Tensor, dict[str, Any]]:
    """Loss and metrics of its policy loss under this name, as a mean over tokens."""
    from verl.workers.config import ActorConfig

    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2} | clips
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    arguments = given["old_log_prob"], given["log_prob"], given["advantages"], given["mask"].double()
    return core_algos.get_policy_loss_fn(name)(*arguments, loss_agg_mode="token-mean", config=config)


def policy_arguments(given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return given["log_prob"], given["old_log_prob"], given["advantages"], given["mask"]


@SEEDS
def test_clipped_loss(seed: int) -> None:
    given = batch(seed)
    theirs, metrics = of_verl("vanilla", given, clip_ratio_high=0.28, clip_ratio_c=1.5)
    losses, ours = clipped_loss(*policy_arguments(given), clip=(0.2, 0.28), dual_clip=1.5)
    torch.testing.assert_close(weigh(losses, given["mask"], "token-mean"), theirs, rtol=1e-12, atol=1e-12)
    assert float(ours["clip_fraction"]) == pytest.approx(metrics["actor/pg_clipfrac"], rel=1e-6)
    assert float(ours["dual_clip_fraction"]) == pytest.approx(metrics["actor/pg_clipfrac_lower"], rel=1e-6)
    assert float(ours["kl"]) == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6)


@SEEDS
@pytest.mark.skipif(not V1, reason="verl 0.8.0 takes the mean over sequences of gspo, whatever the mode")
def test_gspo_loss(seed: int) -> None:
    given = batch(seed)
    theirs, metrics = of_verl("gspo", given)
    losses, ours = gspo_loss(*policy_arguments(given), row_sequences(given["mask"]), clip=(0.2, 0.2))
    torch.testing.assert_close(weigh(losses, given["mask"], "token-mean"), theirs, rtol=1e-12, atol=1e-12)
    assert float(ours["clip_fraction"]) == pytest.approx(metrics["actor/pg_clipfrac"], rel=1e-6)


@SEEDS
def test_cispo_loss(seed: int) -> None:
    given = batch(seed)
    theirs, metrics = of_verl("cispo", given)
    losses, ours = cispo_loss(*policy_arguments(given), clip=(0.2, 0.2))
    torch.testing.assert_close(weigh(losses, given["mask"], "token-mean"), theirs, rtol=1e-12, atol=1e-12)
    assert float(ours["clip_fraction"]) == pytest.approx(metrics["actor/pg_clipfrac"], rel=1e-6)


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_terms(ours: Any, theirs: str) -> None:
    """verl cuts the third one off at 10."""
    given = batch(0)
    losses, _ = kl_loss(given["log_prob"], given["old_log_prob"], torch.ones(ROWS, WIDTH), kind=ours)
    expected = core_algos.kl_penalty(given["log_prob"], given["old_log_prob"], theirs)
    torch.testing.assert_close(losses.clamp(max=10) if ours == "k3" else losses, expected, rtol=1e-12, atol=1e-12)
