"""Weights with plans, adapters and every state of a row, against a slow oracle; other ways to say the same batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_oracle import Rows, loss_configs, row_batches, update_configs, weight_oracle

from miles_norm import LossConfig, RolloutColumns, UpdateConfig, loss_weights, normalize_columns, plan_updates
from miles_norm.errors import SampleError
from miles_norm.loss import mask_loss_weights, update_masses
from miles_norm.result import NormalizedRewards


@given(row_batches(), loss_configs(), update_configs())
def test_weights_of_a_plan(rows: Rows, config: LossConfig, updates: UpdateConfig) -> None:
    plan = plan_updates(rows.result(), updates)
    weights = loss_weights(rows.result(), config, plan).tolist()
    assert weights == pytest.approx(weight_oracle(rows, config, plan.row_update.tolist()), rel=1e-14, abs=0)


@given(row_batches(), loss_configs())
def test_weights_without_a_plan(rows: Rows, config: LossConfig) -> None:
    weights = loss_weights(rows.result(), config).tolist()
    assert weights == pytest.approx(weight_oracle(rows, config, [0] * len(rows.rollout)), rel=1e-14, abs=0)


@given(row_batches(), loss_configs(), update_configs())
def test_masses_of_updates(rows: Rows, config: LossConfig, updates: UpdateConfig) -> None:
    plan = plan_updates(rows.result(), updates)
    weights = loss_weights(rows.result(), config, plan) * rows.result().trainable_tokens
    expected = [float(weights[update].sum()) for update in plan.updates]
    assert update_masses(plan, config).tolist() == pytest.approx(expected, rel=1e-14)


def test_a_rollout_in_two_updates_counts_in_each() -> None:
    # Rows of 1, 2, 3 and 4 tokens of one rollout, two to an update: 1 / 3 in the first, 1 / 7 in the second. Over the
    # batch it is one rollout of 10 tokens.
    columns = RolloutColumns(group=[0] * 4, rollout=[0] * 4, reward=[1.0] * 4, trainable_tokens=[1, 2, 3, 4])
    result = normalize_columns(columns)
    plan = plan_updates(result, UpdateConfig(unit="rows", rows_per_update=2))
    assert loss_weights(result, LossConfig(), plan).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 7, 1 / 7])
    assert loss_weights(result, LossConfig(scope="batch"), plan).tolist() == pytest.approx([1 / 10] * 4)


def test_each_adapter_of_an_update_is_stepped_alone() -> None:
    # Updates of two rollouts. Update 0: rollout 0 (a, 2 tokens) and rollout 1 (b, rows of 1 and 3); update 1: rollouts
    # 2 and 3 (both a, 4 tokens each), so 1 / (2 * 4) there.
    columns = RolloutColumns(
        group=[0, 1, 1, 2, 2],
        rollout=[0, 1, 1, 2, 3],
        reward=[1.0] * 5,
        trainable_tokens=[2, 1, 3, 4, 4],
        adapter=["a", "b", "b", "a", "a"],
    )
    result = normalize_columns(columns)
    plan = plan_updates(result, UpdateConfig(rollouts_per_update=2))
    assert loss_weights(result, None, plan).tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8])
    # Over the batch, a has three rollouts and b one.
    by_batch = loss_weights(result, LossConfig(scope="batch"), plan)
    assert by_batch.tolist() == pytest.approx([1 / 6, 1 / 4, 1 / 4, 1 / 12, 1 / 12])


def test_a_plan_for_another_batch_is_refused() -> None:
    columns = [
        RolloutColumns(group=[0] * n, rollout=[0] * n, reward=[1.0] * n, trainable_tokens=[1] * n) for n in (2, 3)
    ]
    two, three = map(normalize_columns, columns)
    with pytest.raises(SampleError, match=r"a plan for 2 rows.*\n.*one for the 3 rows of the result"):
        loss_weights(three, plan=plan_updates(two))
    other = RolloutColumns(group=[0] * 3, rollout=[0, 0, 1], reward=[1.0] * 3, trainable_tokens=[1] * 3)
    with pytest.raises(SampleError, match=r"3 rows, 1 rollouts and 1 groups, not these\n.*are 2 rollouts in"):
        loss_weights(normalize_columns(other), plan=plan_updates(three))
    # Made anew over the same rows, a result still fits.
    assert loss_weights(normalize_columns(columns[1]), plan=plan_updates(three)).sum() > 0


MASKS = [[1, 0, 1], [1, 1], [0, 0], [1, 1, 1]]
FORMS = {
    "lists": MASKS,
    "tensors": [torch.tensor(mask) for mask in MASKS],
    "padded": torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]),
    "padded_bool": torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool(),
    "array": torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]).numpy(),
    "counts": [2, 2, 0, 3],
    "count_tensor": torch.tensor([2, 2, 0, 3]),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_masks_in_every_form(form: str) -> None:
    # Rollout 0 has 4 tokens, rollout 1 none, rollout 2 three: R = 3.
    weights = mask_loss_weights(FORMS[form], [0, 0, 1, 2])
    assert weights.tolist() == pytest.approx([1 / 12, 1 / 12, 0, 1 / 9], rel=1e-15)


def test_weights_of_masks_know_prompt_groups() -> None:
    config = LossConfig(aggregation="prompt_mean")
    assert mask_loss_weights(MASKS, [0, 0, 1, 2], config, group=["x", "x", "y", "y"]).tolist() == pytest.approx(
        [1 / 8, 1 / 8, 0, 1 / 6], rel=1e-15
    )


@given(row_batches(), loss_configs())
def test_weights_of_counts_are_those_of_a_result(rows: Rows, config: LossConfig) -> None:
    plain = Rows(rows.group, rows.rollout, rows.reward, rows.tokens, [False] * 12, [False] * 12, None)
    n = len(rows.tokens)
    plain.removed, plain.padding = plain.removed[:n], plain.padding[:n]
    ours = mask_loss_weights(rows.tokens, rows.rollout, config, group=rows.group)
    assert ours.tolist() == loss_weights(plain.result(), config).tolist()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([[1, 2], [1], [0, 3]], r"loss mask of rows 0, 2\n.*entries other than 0 and 1, such as 2"),
        (torch.tensor([[1, 0], [1, 7]]), r"loss mask of row 1\n.*entries other than 0 and 1"),
        (torch.ones(2, 2, 2), r"loss masks\n.*shape \[2, 2, 2\]"),
        ([[1], None], r"loss mask of row 1\n.*a mask of type NoneType"),
    ],
)
def test_masks_that_are_none_are_refused(masks: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        mask_loss_weights(masks, list(range(len(masks))))


@given(st.integers(1, 30))
def test_weights_do_not_depend_on_the_order_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.randint(0, 4, (9,), generator=generator)
    tokens = torch.randint(0, 5, (9,), generator=generator)
    order = torch.randperm(9, generator=generator)
    assert torch.equal(mask_loss_weights(tokens[order], rollout[order]), mask_loss_weights(tokens, rollout)[order])


def test_a_plan_of_other_groups_is_refused() -> None:
    def of(groups: list[int]) -> NormalizedRewards:
        return normalize_columns(
            RolloutColumns(group=groups, rollout=[0, 1, 2], reward=[1.0, 0.0, 1.0], trainable_tokens=[1] * 3)
        )

    with pytest.raises(SampleError, match=r"1 groups, not these\n.*in 2 groups"):
        loss_weights(of([0, 0, 1]), plan=plan_updates(of([0, 0, 0])))


def test_a_plan_of_other_adapters_is_refused() -> None:
    def of(adapter: list[str] | None) -> NormalizedRewards:
        # With adapters the group is theirs, so that each rollout is a group of its own in both.
        return normalize_columns(
            RolloutColumns(group=[0, 1], rollout=[0, 1], reward=[1.0] * 2, trainable_tokens=[1] * 2, adapter=adapter)
        )

    for other in (["a", "b"], ["b", "a"], None):
        with pytest.raises(SampleError, match="update plan"):
            loss_weights(of(["a", "a"]), plan=plan_updates(of(other)))
    assert loss_weights(of(["a", "b"]), plan=plan_updates(of(["a", "b"]))).tolist() == [1.0, 1.0]
