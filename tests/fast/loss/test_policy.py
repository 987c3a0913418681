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
from miles_norm.errors import SampleError
from miles_norm.loss import (
    Sequences,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    kl_loss,
    rollout_sequences,
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


def test_metrics_of_the_other_losses_by_hand() -> None:
    # Ratios 2, 1, 1/2 and a masked one; the bounds 0.8 and 1.2 cut two of three off.
    logs, zeros, ones = torch.tensor([2.0, 1.0, 0.5, 9.0]).log(), torch.zeros(4), torch.ones(4)
    mask = torch.tensor([1, 1, 1, 0])
    _, cispo = cispo_loss(logs, zeros, ones, mask, clip=(0.2, 0.2))
    assert [
        float(cispo[name]) for name in ("clip_fraction", "kl", "ratio_min", "ratio_max", "tokens")
    ] == pytest.approx([2 / 3, 0.0, 0.5, 2.0, 3], abs=1e-6)
    _, importance = truncated_importance_sampling(ones, logs, zeros, mask, bounds=(0.0, 1.5))
    names = ("truncated_fraction", "importance_mean", "importance_min", "importance_max", "mismatch_kl", "tokens")
    assert [float(importance[name]) for name in names] == pytest.approx([1 / 3, 3.5 / 3, 0.5, 2.0, 0.0, 3], abs=1e-6)
    # As one sequence, ratios 2, 1, 1 have the mean log-ratio ln(2) / 3: 1.26, which a bound of 0.3 lets pass, 0.2 not.
    sequence = row_sequences(mask, torch.zeros(4, dtype=torch.int64), num_rows=1)
    logs = torch.tensor([2.0, 1.0, 1.0, 9.0]).log()
    for bound, fraction in ((0.3, 0.0), (0.2, 1.0)):
        _, gspo = gspo_loss(logs, zeros, ones, mask, sequence, clip=(0.2, bound))
        found = [float(gspo[name]) for name in ("clip_fraction", "kl", "ratio_min", "ratio_max")]
        assert found == pytest.approx([fraction, -math.log(2) / 3, 2 ** (1 / 3), 2 ** (1 / 3)], rel=1e-6)


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
        SampleError, match=r"ratio of rollout 0 \(id 0\)\n.*2 of 3 trainable tokens in this micro-batch"
    ) as raised:
        gspo_loss(log_probs, log_probs, log_probs, mask, sequences)
    assert raised.value.rows == (0, 1)
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
