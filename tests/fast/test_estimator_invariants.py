"""What must not change the rarer estimators, bit for bit: the order of rows, cutting rollouts, the names of ids."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_invariants import IDS, Rows, batches, bits

from miles_norm import NormalizationConfig, RolloutColumns, normalize_columns
from miles_norm.config import EstimatorOptions
from miles_norm.result import NormalizedRewards

THIRDS = st.integers(0, 5).map(lambda k: k / 3)
BINARY = st.sampled_from([0.0, 1.0])
ANY = st.one_of(THIRDS, st.floats(-1e6, 1e6, width=32))


def whitening(kind: str, shift: bool) -> dict[str, Any]:
    return {"whitening": kind, "whitening_shift": shift}


# Estimator, its options, and rewards that it can read.
KINDS: dict[str, tuple[str, dict[str, Any], st.SearchStrategy[float]]] = {
    "opo": ("opo", {}, ANY),
    "maxrl": ("maxrl", {}, THIRDS),
    "topk_gap": ("pass_at_k", {}, ANY),
    "analytic": ("pass_at_k", {"pass_at_k": "analytic", "k": 2}, BINARY),
    "gdpo": ("gdpo", {"gdpo_components": ("right", "short"), "gdpo_weights": (0.7, 1.3)}, ANY),
    "grpo by rollout": ("grpo", whitening("rollout", False), ANY),
    "rloo by token": ("rloo", whitening("token", False), ANY),
    "opo by token, shifted": ("opo", whitening("token", True), ANY),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
WITHIN_GROUPS = [kind for kind in KINDS if kind != "gdpo" and " by " not in kind]


def drawn(data: st.DataObject, kind: str) -> Rows:
    sizes = (2, 3, 4, 5) if kind == "analytic" else (1, 2, 3, 4, 5, 7)
    return data.draw(batches(KINDS[kind][2], sizes))


def normalized(rows: Rows, kind: str) -> NormalizedRewards:
    estimator, options, _ = KINDS[kind]
    columns = {
        "group": list(rows.group),
        "rollout": list(rows.rollout),
        "reward": list(rows.reward),
        "trainable_tokens": list(rows.tokens),
    }
    if estimator == "gdpo":
        columns["components"] = {"right": [r > 0.5 for r in rows.reward], "short": [r % 0.7 for r in rows.reward]}
    config = NormalizationConfig(advantage_estimator=estimator, options=EstimatorOptions(**options))
    return normalize_columns(RolloutColumns(**columns), config)


@every_kind
@settings(max_examples=15)
@given(data=st.data())
def test_permuted_rows_permute_the_result(kind: str, data: st.DataObject) -> None:
    rows = drawn(data, kind)
    order = data.draw(st.permutations(range(len(rows))))
    assert bits(normalized(rows.take(order), kind).advantages) == bits(normalized(rows, kind).advantages[order])


@every_kind
@settings(max_examples=15)
@given(data=st.data())
def test_cutting_rollouts_changes_no_bit(kind: str, data: st.DataObject) -> None:
    """Each row is cut in up to four, its tokens among them; a piece may have none."""
    rows = drawn(data, kind)
    origin, tokens = [], []
    for row, length in enumerate(rows.tokens):
        cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=3)))
        tokens += [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
        origin += [row] * (len(cuts) + 1)
    cut = replace(rows.take(origin), tokens=tuple(tokens))
    expected, found = normalized(rows, kind), normalized(cut, kind)
    assert bits(found.rollout_advantages) == bits(expected.rollout_advantages)
    assert bits(found.advantages) == bits(expected.advantages[origin])


@every_kind
@settings(max_examples=15)
@given(data=st.data())
def test_renaming_ids_changes_no_bit(kind: str, data: st.DataObject) -> None:
    rows = drawn(data, kind)
    names = [
        dict(zip(ids, data.draw(st.lists(IDS, min_size=len(ids), max_size=len(ids), unique=True)), strict=True))
        for ids in (sorted(set(rows.group)), sorted(set(rows.rollout)))
    ]
    renamed = replace(
        rows, group=tuple(names[0][g] for g in rows.group), rollout=tuple(names[1][r] for r in rows.rollout)
    )
    assert bits(normalized(renamed, kind).advantages) == bits(normalized(rows, kind).advantages)


@pytest.mark.parametrize("kind", WITHIN_GROUPS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_group_alone_or_in_a_batch(kind: str, data: st.DataObject) -> None:
    """All but those that have a stage over the batch."""
    rows = drawn(data, kind)
    together = normalized(rows, kind)
    for members in together.groups:
        assert bits(normalized(rows.take(members), kind).advantages) == bits(together.advantages[members])


@pytest.mark.parametrize("kind", ["grpo by rollout", "rloo by token", "opo by token, shifted", "gdpo"])
@settings(max_examples=15)
@given(data=st.data())
def test_the_batch_stage_gives_unit_deviation(kind: str, data: st.DataObject) -> None:
    """Over rollouts or tokens, wherever the deviation before it is far above its epsilon."""
    rows = data.draw(batches(THIRDS))
    result = normalized(rows, kind)
    advantages = result.rollout_advantages.double()
    by_token = "token" in kind
    tokens = torch.tensor(rows.tokens).new_zeros(len(advantages))
    tokens.index_add_(0, result.index.row_rollout, torch.tensor(rows.tokens))
    weighed = torch.repeat_interleave(advantages, tokens) if by_token else advantages
    among = advantages[tokens > 0] if by_token else advantages
    if len(among) > 1 and float(among.max() - among.min()) > 1e-3:
        assert float(weighed.std()) == pytest.approx(1.0, abs=1e-4)
        if "shifted" in kind:
            assert float(weighed.mean()) == pytest.approx(0.0, abs=1e-5)
