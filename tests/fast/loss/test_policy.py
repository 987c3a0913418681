"""Policy losses against slow float64 oracles in NumPy, and their gradients against differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles_norm import RolloutColumns, normalize_columns
from miles_norm.errors import ConfigError, SampleError
from miles_norm.loss import (
    Sequences,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    rollout_sequences,
    row_of_tokens,
    row_sequences,
    sequence_log_ratio,
    truncated_importance_sampling,
)

Case = dict[str, Any]
CLIPS = [(0.2, 0.2), (0.2, 0.28), (1.0, 0.0), (0.0, 4.0)]


@st.composite
def cases(draw: Any) -> Case:
    """Log-probs, advantages, masks with holes and with rows of nothing; masked entries hold NaN."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    number = st.integers(-300, 300).map(lambda k: k / 100)
    values = {
        name: np.array(draw(st.lists(number, min_size=rows * width, max_size=rows * width))).reshape(rows, width)
        for name in ("new", "old", "other", "advantage")
    }
    flags = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    mask = np.array(flags, dtype=np.int64).reshape(rows, width)
    for array in values.values():
        array[mask == 0] = math.nan
    sequence = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    return values | {"mask": mask, "sequence": np.array(sequence)}


def tensors(case: Case, *names: str) -> list[Tensor]:
    return [torch.tensor(case[name]) for name in names]


def token_by_token(case: Case, loss: Callable[[int, int], float]) -> np.ndarray[Any, Any]:
    out = np.zeros(case["mask"].shape)
    for n, t in zip(*np.nonzero(case["mask"]), strict=True):
        out[n, t] = loss(n, t)
    return out


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def clipped_oracle(ratio: float, advantage: float, bounds: tuple[float, float], dual: float | None = None) -> float:
    surrogate = min(ratio * advantage, clip(ratio, 1 - bounds[0], 1 + bounds[1]) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)
    return -surrogate


def check(losses: Tensor, oracle: np.ndarray[Any, Any]) -> None:
    assert losses.dtype == torch.float64
    np.testing.assert_allclose(losses.numpy(), oracle, rtol=1e-13, atol=1e-13)


def mean_over_tokens(case: Case, value: Callable[[int, int], float]) -> float:
    tokens = int(case["mask"].sum())
    return float(token_by_token(case, value).sum()) / max(tokens, 1)


@given(cases(), st.sampled_from(CLIPS), st.sampled_from([None, 1.5, 3.0]))
def test_clipped_loss(case: Case, bounds: tuple[float, float], dual: float | None) -> None:
    def ratio(n: int, t: int) -> float:
        return math.exp(case["new"][n, t] - case["old"][n, t])

    def loss(n: int, t: int) -> float:
        return clipped_oracle(ratio(n, t), case["advantage"][n, t], bounds, dual)

    losses, metrics = clipped_loss(*tensors(case, "new", "old", "advantage", "mask"), clip=bounds, dual_clip=dual)
    check(losses, token_by_token(case, loss))
    ratios = [ratio(n, t) for n, t in zip(*np.nonzero(case["mask"]), strict=True)]
    assert float(metrics["ratio_min"]) == pytest.approx(min(ratios, default=math.inf))
    assert float(metrics["ratio_max"]) == pytest.approx(max(ratios, default=-math.inf))
    assert int(metrics["tokens"]) == len(ratios)
    assert float(metrics["kl"]) == pytest.approx(mean_over_tokens(case, lambda n, t: -math.log(ratio(n, t))), abs=1e-12)


def test_metrics_of_the_clipped_loss_by_hand() -> None:
    # Ratios 2, 2, 1/2, 8 and a masked one; advantages 1, -1, -1, -1. The clip decides where a ratio above 1.2 meets a
    # positive advantage, or one under 0.8 a negative one: tokens 0 and 2. The second clip holds token 3, 8 > 3.
    ratios, advantages = torch.tensor([2.0, 2.0, 0.5, 8.0, 100.0]), torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    losses, metrics = clipped_loss(ratios.log(), torch.zeros(5), advantages, mask, dual_clip=3.0)
    assert losses.tolist() == pytest.approx([-1.2, 2.0, 0.8, 3.0, 0.0])
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "clip_fraction": 2 / 4,
            "dual_clip_fraction": 1 / 4,
            "kl": -math.log(2 * 2 * 0.5 * 8) / 4,
            "ratio_min": 0.5,
            "ratio_max": 8.0,
            "tokens": 4,
        },
        rel=1e-5,
    )


@given(cases(), st.sampled_from(CLIPS))
def test_cispo_loss(case: Case, bounds: tuple[float, float]) -> None:
    def loss(n: int, t: int) -> float:
        ratio = math.exp(case["new"][n, t] - case["old"][n, t])
        return -clip(ratio, 1 - bounds[0], 1 + bounds[1]) * case["advantage"][n, t] * case["new"][n, t]

    check(cispo_loss(*tensors(case, "new", "old", "advantage", "mask"), clip=bounds)[0], token_by_token(case, loss))


@given(cases(), st.sampled_from(["k1", "k2", "k3"]))
def test_kl_loss(case: Case, kind: Any) -> None:
    def loss(n: int, t: int) -> float:
        d = case["new"][n, t] - case["other"][n, t]
        return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]

    losses, metrics = kl_loss(*tensors(case, "new", "other", "mask"), kind=kind)
    check(losses, token_by_token(case, loss))
    assert float(metrics["kl"]) == pytest.approx(mean_over_tokens(case, loss), abs=1e-12)


@given(cases(), st.sampled_from([(0.0, 2.0), (0.5, 1.0), (0.0, math.inf)]))
def test_truncated_importance_sampling(case: Case, bounds: tuple[float, float]) -> None:
    def loss(n: int, t: int) -> float:
        return clip(math.exp(case["old"][n, t] - case["other"][n, t]), *bounds) * case["advantage"][n, t]

    given_losses = tensors(case, "advantage", "old", "other", "mask")
    losses, metrics = truncated_importance_sampling(*given_losses, bounds=bounds)
    check(losses, token_by_token(case, loss))
    drift = mean_over_tokens(case, lambda n, t: case["other"][n, t] - case["old"][n, t])
    assert float(metrics["mismatch_kl"]) == pytest.approx(drift, abs=1e-12)


def gspo_oracle(case: Case, bounds: tuple[float, float], sequence: list[int]) -> np.ndarray[Any, Any]:
    ratios = {}
    for s in set(sequence):
        diffs = [
            case["new"][n, t] - case["old"][n, t]
            for n, t in zip(*np.nonzero(case["mask"]), strict=True)
            if sequence[n] == s
        ]
        ratios[s] = math.exp(sum(diffs) / max(len(diffs), 1))
    return token_by_token(case, lambda n, t: clipped_oracle(ratios[sequence[n]], case["advantage"][n, t], bounds))


def rollouts_of(case: Case) -> Sequences:
    tokens = torch.zeros(3, dtype=torch.int64)
    tokens.index_add_(0, torch.tensor(case["sequence"]), torch.tensor(case["mask"]).sum(1))
    return Sequences(torch.tensor(case["sequence"]), tokens)


@given(cases(), st.sampled_from([*CLIPS, (3e-4, 4e-4)]))
def test_gspo_loss_by_row_and_by_rollout(case: Case, bounds: tuple[float, float]) -> None:
    given_tensors = tensors(case, "new", "old", "advantage", "mask")
    by_row, _ = gspo_loss(*given_tensors, row_sequences(given_tensors[3]), clip=bounds)
    check(by_row, gspo_oracle(case, bounds, list(range(len(case["mask"])))))
    by_rollout, _ = gspo_loss(*given_tensors, rollouts_of(case), clip=bounds)
    check(by_rollout, gspo_oracle(case, bounds, case["sequence"].tolist()))


@given(cases(), st.integers(0, 4))
def test_gspo_over_micro_batches(case: Case, cut: int) -> None:
    """Parts of the log-ratio add up, and the losses of the micro-batches are those of the whole."""
    given_tensors = tensors(case, "new", "old", "advantage", "mask")
    whole, _ = gspo_loss(*given_tensors, rollouts_of(case), clip=(0.2, 0.2))
    batches = [[tensor[part] for tensor in given_tensors] for part in (slice(0, cut), slice(cut, None))]
    indices = [rollouts_of(case).index[:cut], rollouts_of(case).index[cut:]]
    parts = [Sequences(index, rollouts_of(case).tokens) for index in indices]
    log_ratio = sum(
        sequence_log_ratio(new, old, mask, part) for (new, old, _, mask), part in zip(batches, parts, strict=True)
    )
    losses = [
        gspo_loss(*batch, Sequences(part.index, part.tokens, log_ratio), clip=(0.2, 0.2))[0]
        for batch, part in zip(batches, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(losses), whole, rtol=1e-12, atol=1e-12)


def test_gspo_without_all_siblings_is_an_error() -> None:
    columns = RolloutColumns(group=[0] * 4, rollout=[0, 0, 1, 2], reward=[0] * 4, trainable_tokens=[2, 1, 2, 2])
    result = normalize_columns(columns)
    log_probs, mask = torch.zeros(2, 2), torch.ones(2, 2)
    sequences = rollout_sequences(result, torch.tensor([0, 2]))
    with pytest.raises(
        SampleError, match=r"ratio of sequence 0\n.*2 of 3 trainable tokens in this micro-batch"
    ) as raised:
        gspo_loss(log_probs, log_probs, log_probs, mask, sequences)
    assert raised.value.rows == (0,)
    # The sibling that no update holds is not waited for.
    kept = torch.tensor([True, False, True, True])
    gspo_loss(log_probs, log_probs, log_probs, mask, rollout_sequences(result, torch.tensor([0, 2]), kept=kept))


def test_gspo_weighed_by_rollout_is_the_sequence_loss() -> None:
    """Value and gradient of -1/R sum_r min(s_r A_r, clip(s_r) A_r), differentiated through s_r."""
    columns = RolloutColumns(group=[0] * 3, rollout=[0, 0, 1], reward=[1, 1, 0], trainable_tokens=[2, 1, 3])
    result = normalize_columns(columns)
    generator = torch.Generator().manual_seed(0)
    new = (torch.randn(3, 3, generator=generator, dtype=torch.float64) / 10).requires_grad_()
    old = torch.randn(3, 3, generator=generator, dtype=torch.float64) / 10
    mask = torch.tensor([[1, 1, 0], [0, 0, 1], [1, 1, 1]])
    advantages = torch.tensor([[1.0], [1.0], [-1.0]], dtype=torch.float64)
    losses, _ = gspo_loss(new, old, advantages, mask, rollout_sequences(result, torch.arange(3)), clip=(0.3, 0.3))
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6], dtype=torch.float64)  # 1 / (R L_r): R = 2, both have 3 tokens
    value = (weights[:, None] * losses).sum()
    ratio = [((new - old) * mask)[rows].sum() / 3 for rows in ([0, 1], [2])]
    surrogates = [
        torch.minimum(s.exp() * a, s.exp().clamp(0.7, 1.3) * a) for s, a in zip(ratio, (1.0, -1.0), strict=True)
    ]
    expected = -(surrogates[0] + surrogates[1]) / 2
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    (ours,) = torch.autograd.grad(value, new)
    (theirs,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def grad_inputs(rows: int = 3, width: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratios on both sides of every bound, none at one."""
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.randint(0, 2, (rows, width), generator=generator)
    return new, torch.where(mask == 0, torch.nan, old), torch.where(mask == 0, torch.nan, advantages), mask


def test_gradients_of_losses_whose_ratio_is_differentiated() -> None:
    new, old, advantages, mask = grad_inputs()
    for settings in ({}, {"clip": (0.1, 0.4)}, {"dual_clip": 1.2}):
        assert torch.autograd.gradcheck(lambda x, s=settings: clipped_loss(x, old, advantages, mask, **s)[0], (new,))
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, k=kind: kl_loss(x, old, mask, kind=k)[0], (new,))
    assert torch.autograd.gradcheck(
        lambda x: truncated_importance_sampling(x, old, torch.zeros_like(old), mask)[0], (new,)
    )


def test_gradients_of_losses_with_a_frozen_ratio() -> None:
    """gradcheck would move the frozen part too, so it gets a function in which that part stays where it is."""
    new, old, advantages, mask = grad_inputs()
    safe = torch.where(mask == 0, 0.0, old)
    ratio = (new.detach() - safe).exp().clamp(0.5, 1.5)
    frozen = (-ratio * torch.where(mask == 0, 0.0, advantages)).detach()
    losses, _ = cispo_loss(new, old, advantages, mask, clip=(0.5, 0.5))
    (ours,) = torch.autograd.grad(losses.sum(), new)
    assert torch.autograd.gradcheck(lambda x: frozen * x, (new,))
    torch.testing.assert_close(ours, frozen * mask, rtol=1e-13, atol=0)


def test_gradients_of_gspo() -> None:
    """With the log-ratio frozen beforehand, as for micro-batches: each token moves its own factor."""
    new, old, advantages, mask = grad_inputs()
    rows = row_sequences(mask)
    log_ratio = sequence_log_ratio(new, old, mask, rows)
    frozen = Sequences(rows.index, rows.tokens, log_ratio)
    losses, _ = gspo_loss(new, old, advantages, mask, frozen, clip=(0.2, 0.2))
    (ours,) = torch.autograd.grad(losses.sum(), new)
    start = new.detach().clone()  # gradcheck moves the entries of new in place
    factor, advantage = log_ratio.exp()[:, None], torch.where(mask == 0, 0.0, advantages)

    def loss(x: Tensor) -> Tensor:
        ratio = factor * (x - start).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask

    assert torch.autograd.gradcheck(loss, (new,))
    (expected,) = torch.autograd.grad(loss(new).sum(), new)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    assert torch.count_nonzero(ours) > 0


LOSSES: dict[str, Callable[..., Tensor]] = {
    "clipped": lambda new, old, a, mask, _: clipped_loss(new, old, a, mask)[0],
    "cispo": lambda new, old, a, mask, _: cispo_loss(new, old, a, mask, clip=(0.2, 0.2))[0],
    "gspo": lambda new, old, a, mask, s: gspo_loss(new, old, a, mask, s, clip=(0.2, 0.2))[0],
    "kl": lambda new, old, _a, mask, _: kl_loss(new, old, mask)[0],
    "importance": lambda new, old, a, mask, _: truncated_importance_sampling(a * new, old, new.detach(), mask)[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_packed_tokens_have_the_losses_of_padded_ones(name: str) -> None:
    new, old, advantages, mask = grad_inputs()
    lengths = torch.tensor([4, 0, 2])
    inside = torch.arange(4) < lengths[:, None]
    rows = row_of_tokens(torch.tensor([0, 4, 4, 6]), 6)
    padded = LOSSES[name](new, old, advantages, mask * inside, row_sequences(mask * inside))
    packed_mask = mask[inside]
    packed = LOSSES[name](
        new[inside], old[inside], advantages[inside], packed_mask, row_sequences(packed_mask, rows, num_rows=3)
    )
    assert torch.equal(packed, padded[inside])
    assert torch.count_nonzero(packed) > 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_micro_batch_without_tokens(name: str, shape: tuple[int, int]) -> None:
    new, rest = torch.zeros(shape, requires_grad=True), torch.zeros(shape)
    losses = LOSSES[name](new, rest, rest, rest, row_sequences(rest))
    losses.sum().backward()
    assert losses.shape == shape
    assert new.grad is not None


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_may_hold_anything(name: str) -> None:
    for anything in (math.nan, math.inf, -math.inf):
        new = torch.tensor([[0.5, anything]], requires_grad=True)
        other = torch.tensor([[0.25, anything]])
        losses = LOSSES[name](new, other, other, torch.tensor([[1, 0]]), row_sequences(torch.tensor([[1, 0]])))
        assert losses[0, 1] == 0
        assert torch.isfinite(losses).all()
        losses.sum().backward()
        assert new.grad is not None
        assert name == "importance" or new.grad[0, 1] == 0  # the caller's own product there is the caller's


def test_a_ratio_beyond_every_bound_keeps_gradients_finite() -> None:
    new = torch.tensor([200.0, -200.0], requires_grad=True)
    losses, metrics = clipped_loss(new, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.2, 0.8])
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0]
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(20))


def test_half_precision_is_computed_in_float32() -> None:
    new = torch.tensor([0.1, 0.3], dtype=torch.bfloat16, requires_grad=True)
    losses, _ = clipped_loss(new, torch.zeros(2), torch.ones(2), torch.ones(2))
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([-math.exp(new.tolist()[0]), -1.2], rel=1e-6)
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: clipped_loss(x, x[:1], x, x), r"old_log_probs\n.*shape \[1, 2\]\n.*the log-probs, \[2, 2\]"),
        (lambda x: clipped_loss(x, x, x[0], x), r"advantages\n.*shape \[2\]"),
        (lambda x: clipped_loss(x, x, x, x[0]), r"mask\n.*shape \[2\]"),
        (lambda x: kl_loss(x, x[:, :1], x), r"reference_log_probs\n.*shape \[2, 1\]"),
        (lambda x: gspo_loss(x, x, x, x, Sequences(torch.zeros(3, dtype=torch.int64), torch.ones(1))), "row values"),
        (lambda x: gspo_loss(x[0], x[0], x[0], x[0], Sequences(torch.tensor([0]), torch.ones(1))), "row index"),
    ],
)
def test_other_shapes_are_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        call(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: clipped_loss(x, x, x, x, clip=(-0.1, 0.2)), r"clip\n.*\(-0.1, 0.2\)"),
        (lambda x: cispo_loss(x, x, x, x, clip=(0.2, -1)), r"clip\n.*\(0.2, -1\)"),
        (lambda x: clipped_loss(x, x, x, x, dual_clip=1.0), r"dual_clip\n.*1.0"),
        (lambda x: kl_loss(x, x, x, kind="k4"), r"kind of KL estimate\n.*'k4'"),
        (lambda x: truncated_importance_sampling(x, x, x, x, bounds=(2.0, 1.0)), r"bounds\n.*\(2.0, 1.0\)"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(torch.ones(2))
