"""Agent Lightning's two functions: golden numbers at both trace levels, the rule row by row, and what is refused."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from agent_lightning_rows import ROWS, Batch, advantages_of, batch_of, mask_of
from golden_dumps import AGENT_LIGHTNING, DATA
from torch import Tensor

from miles_norm import LossConfig, NormalizationConfig
from miles_norm.errors import ConfigError, DisagreeingRewardsError, GroupingError, MissingRewardError, SampleError
from miles_norm.integrations.agent_lightning import (
    compute_rollout_level_advantage,
    convert_rollouts_to_train_data,
    normalize_advantages_by_rollout,
)

LEVELS = ["transition", "trajectory"]


def golden_batch(level: str) -> Batch:
    golden = AGENT_LIGHTNING[level]
    return batch_of(
        golden["response_mask_sums"],
        golden["token_level_score_sums"],
        golden["rollout_id_list"],
        golden["data_id_list"],
    )


class TestGolden:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize(("std", "tolerance"), [(True, 0.005), (False, 0.0)])
    def test_advantages(self, level: str, std: bool, tolerance: float) -> None:
        """Upstream computes in bfloat16: differences of quarters are exact there, quotients have three digits."""
        golden = AGENT_LIGHTNING[level][f"rollout_level_advantage_grpo_std_{'on' if std else 'off'}"]
        batch = golden_batch(level)
        advantages = advantages_of(batch, norm_adv_by_std_in_grpo=std)
        mask = batch.batch["response_mask"]
        assert advantages.dtype == torch.float32
        assert torch.equal(advantages, advantages[:, :1] * mask)
        assert advantages[:, 0].tolist() == pytest.approx(golden["row_advantage"], rel=tolerance, abs=1e-7)
        assert torch.equal(batch.batch["returns"], advantages)
        assert list(batch.non_tensor_batch["uid"]) == AGENT_LIGHTNING[level]["data_id_list"]

    @pytest.mark.parametrize("level", LEVELS)
    def test_counts(self, level: str) -> None:
        _, counts = compute_rollout_level_advantage(
            golden_batch(level), adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=4
        )
        assert counts == AGENT_LIGHTNING[level]["rollout_level_advantage_grpo_std_on"]["metrics"]
        assert {type(count) for count in counts.values()} == {int}

    @pytest.mark.parametrize("level", LEVELS)
    def test_row_weights_and_masses(self, level: str) -> None:
        golden = AGENT_LIGHTNING[level]
        mask, ids = mask_of(golden["response_mask_sums"]), golden["rollout_id_list"]
        scaled = normalize_advantages_by_rollout(torch.ones(mask.shape), mask, ids, num_trained_rows=len(ids))
        assert scaled[:, 0].tolist() == golden["row_weight_per_token"]
        assert (scaled * mask).sum(dim=1).tolist() == pytest.approx(golden["row_mass"], rel=1e-6)
        assert float((scaled * mask).sum()) == pytest.approx(golden["total_mass"], rel=1e-6)
        # The mean over the eight rollouts instead: a total of 1 at both levels.
        for settings in ({"num_trained_rows": len(ids), "divisor": "rollouts"}, {}):
            scaled = normalize_advantages_by_rollout(torch.ones(mask.shape), mask, ids, **settings)
            assert float((scaled * mask).sum()) == pytest.approx(1.0, rel=1e-6)

    @pytest.mark.parametrize("level", LEVELS)
    def test_train_data_of_its_rollouts(self, level: str) -> None:
        """The same eight rollouts as the rollout manager returned them; the one without a reward counts as 0."""
        golden = AGENT_LIGHTNING[level]
        data = convert_rollouts_to_train_data(
            json.loads((DATA / "agl_rollouts.json").read_text(encoding="utf-8")),
            NormalizationConfig(missing_reward="zero", grpo_std_normalization=False),
            level=level,  # type: ignore[arg-type]
            loss_config=LossConfig(divisor="trained_rows"),
        )
        assert [sum(mask) for mask in data["loss_masks"].tolists()] == golden["response_mask_sums"]
        assert data["rewards"].tolist() == golden["rollout_level_advantage_grpo_std_off"]["row_advantage"]
        assert data["weights"].tolist() == pytest.approx(golden["row_weight_per_token"], rel=1e-6)
        with pytest.raises(MissingRewardError, match="reward of row"):
            convert_rollouts_to_train_data(json.loads((DATA / "agl_rollouts.json").read_text(encoding="utf-8")))

    def test_rollouts_that_leave_no_row_are_named(self, caplog: pytest.LogCaptureFixture) -> None:
        def rollout(name: str, reward: float, *responses: list[int]) -> dict[str, Any]:
            triplets = [{"prompt": {"token_ids": [1]}, "response": {"token_ids": ids}} for ids in responses]
            return {"rollout_id": name, "data_id": "d", "final_reward": reward, "triplets": triplets}

        config = NormalizationConfig(advantage_estimator="dr_grpo")
        given = [rollout("a", 1, [2]), rollout("b", 0), rollout("c", 0, []), rollout("d", 0, [], [3])]
        # The mean is that of a and d.
        assert convert_rollouts_to_train_data(given, config)["rewards"].tolist() == [0.5, -0.5]
        [warning] = caplog.messages
        assert warning.startswith("rollouts b, c: no row")
        caplog.clear()
        convert_rollouts_to_train_data([given[0], given[3]], config)
        assert not caplog.messages


def divided_row_by_row(advantages: Tensor, mask: Tensor, ids: Sequence[Any], count: int) -> Tensor:
    """The rule once more, as a loop over rows in the dtype of the advantages."""
    tokens = {i: sum(int(row.sum()) for row, other in zip(mask, ids, strict=True) if other == i) for i in set(ids)}
    return torch.stack([row / max(tokens[i] * count, 1) for row, i in zip(advantages, ids, strict=True)])


class TestDivision:
    @pytest.mark.parametrize("seed", range(5))
    def test_same_bits_as_the_loop_in_float32(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.randint(0, 2, (9, 7), generator=generator)
        mask[4] = 0
        advantages = torch.randn(9, 7, generator=generator)
        ids = ["a", "b", "a", "c", "d", "b", "c", "c", "a"]
        scaled = normalize_advantages_by_rollout(advantages, mask, ids, num_trained_rows=9)
        assert torch.equal(scaled, divided_row_by_row(advantages, mask, ids, 9))
        scaled = normalize_advantages_by_rollout(advantages, mask, ids)
        assert torch.equal(scaled, divided_row_by_row(advantages, mask, ids, 4))
        # Rollout d has no trainable token and keeps its advantages.
        assert torch.equal(scaled[4], advantages[4])

    def test_the_divisor_is_not_rounded_to_the_dtype_of_the_advantages(self) -> None:
        # 257 is 256 in bfloat16. 1/257 = 255.004/65536, and 255/65536 is a bfloat16; 1/256 is another.
        scaled = normalize_advantages_by_rollout(torch.ones(1, 257).bfloat16(), torch.ones(1, 257), ["a"])
        assert scaled.dtype == torch.bfloat16
        assert scaled.unique().tolist() == [255 / 65536]

    def test_ids_of_any_kind(self) -> None:
        mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
        expected = normalize_advantages_by_rollout(torch.ones(3, 2), mask, ["x", "x", "y"])
        for ids in (
            [7, 7, 3],
            np.array(["x", "x", "y"], dtype=object),
            torch.tensor([1, 1, 0]),
            (("a", 1),) * 2 + (2,),
        ):
            assert torch.equal(normalize_advantages_by_rollout(torch.ones(3, 2), mask, ids), expected)

    def test_refusals(self) -> None:
        ones, mask = torch.ones(2, 3), torch.ones(2, 3)
        with pytest.raises(SampleError, match=r"rollout column\n  got:      shape \[1\]\n  expected: \[2\]"):
            normalize_advantages_by_rollout(ones, mask, ["a"])
        with pytest.raises(SampleError, match=r"rollout id of row 1\n  got:      None\n  expected: an id on every row"):
            normalize_advantages_by_rollout(ones, mask, ["a", None])
        with pytest.raises(SampleError, match="advantages\n  got:      no rows"):
            normalize_advantages_by_rollout(ones[:0], mask[:0], [])
        with pytest.raises(ConfigError, match="got:      num_trained_rows=0\n  expected: at least 1"):
            normalize_advantages_by_rollout(ones, mask, ["a", "b"], num_trained_rows=0)
        with pytest.raises(ConfigError, match="divisor='trained_rows' without num_trained_rows"):
            normalize_advantages_by_rollout(ones, mask, ["a", "b"], divisor="trained_rows")
        with pytest.raises(ConfigError, match="expected: 'trained_rows' or 'rollouts'"):
            normalize_advantages_by_rollout(ones, mask, ["a", "b"], divisor="rows")  # type: ignore[arg-type]


class TestAdvantages:
    @pytest.mark.parametrize(
        ("estimator", "expected"),
        [
            # grpo: the mean of 1 and 0 is 1/2, their deviation sqrt(1/2).
            ("grpo", [0.5 / (0.5**0.5 + 1e-6)] * 2 + [-0.5 / (0.5**0.5 + 1e-6), 0.0]),
            ("grpo_vectorized", [0.5 / (0.5**0.5 + 1e-6)] * 2 + [-0.5 / (0.5**0.5 + 1e-6), 0.0]),
            ("rloo", [1.0, 1.0, -1.0, 0.0]),
            ("rloo_vectorized", [1.0, 1.0, -1.0, 0.0]),
            # opo: the baseline is (5 tokens * 1 + 1 token * 0) / 6.
            ("opo", [1 / 6, 1 / 6, -5 / 6, 0.0]),
        ],
    )
    def test_estimators(self, estimator: str, expected: list[float]) -> None:
        batch = batch_of(**ROWS, uids=list("pppq"))
        assert advantages_of(batch, adv_estimator=estimator)[:, 0].tolist() == pytest.approx(expected, rel=1e-6)

    def test_verls_enum(self) -> None:
        class Name:
            value = "rloo"

        assert advantages_of(batch_of(**ROWS, uids=list("pppq")), adv_estimator=Name())[2, 0] == -1.0

    def test_an_estimator_of_verl_is_called_on_one_row_per_rollout(self) -> None:
        """It gets the mainstream rows: row 1 of rollout a has three tokens, row 0 two."""
        seen = {}

        def twice_the_reward(batch: Batch, **settings: Any) -> Batch:
            seen.update(settings, rows=batch.batch["response_mask"].sum(dim=1).tolist())
            rewards = 2 * batch.batch["token_level_rewards"].float().sum(dim=1, keepdim=True)
            batch.batch["advantages"] = rewards * batch.batch["response_mask"]
            return batch

        batch = batch_of(**ROWS, uids=list("pppq"))
        advantages = advantages_of(batch, adv_estimator="gae", gamma=0.5, compute_advantage_fn=twice_the_reward)
        assert (seen["rows"], seen["adv_estimator"], seen["gamma"], seen["num_repeat"]) == ([3, 1, 2], "gae", 0.5, 4)
        assert advantages.tolist() == [[2, 2, 0], [2, 2, 2], [0, 0, 0], [2, 2, 0]]
        assert "returns" not in batch.batch

    def test_an_estimator_that_gives_every_token_its_own_value_is_refused(self) -> None:
        def growing(batch: Batch, **_: Any) -> Batch:
            batch.batch["advantages"] = torch.arange(3.0).expand(len(batch), 3)
            return batch

        with pytest.raises(
            SampleError, match=r"advantages of rows 1, 3\n  got:      values that differ between tokens"
        ):
            advantages_of(batch_of(**ROWS, uids=list("pppq")), compute_advantage_fn=growing)

    def test_an_estimators_value_for_a_rollout_without_tokens_is_not_looked_at(self) -> None:
        def undefined(batch: Batch, **_: Any) -> Batch:
            mask = batch.batch["response_mask"]
            batch.batch["advantages"] = torch.where(mask.any(dim=1, keepdim=True), 3.0, torch.nan).expand(mask.shape)
            return batch

        batch = batch_of(**{**ROWS, "tokens": [2, 3, 0, 2]}, uids=list("pppq"))
        advantages = advantages_of(batch, compute_advantage_fn=undefined)
        assert advantages.tolist() == [[3, 3, 0], [3, 3, 3], [0, 0, 0], [3, 3, 0]]

    def test_rewards_are_added_in_float64(self) -> None:
        """256 + 1 is 256 in bfloat16, which would leave nothing to tell the rollouts apart."""
        batch = batch_of([2, 2], [0.0, 0.0], ["a", "b"], ["p", "p"])
        batch.batch["token_level_rewards"] = torch.tensor([[256.0, 1.0], [256.0, 0.0]], dtype=torch.bfloat16)
        assert advantages_of(batch, norm_adv_by_std_in_grpo=False)[:, 0].tolist() == [0.5, -0.5]

    def test_a_rollout_without_tokens_counts(self) -> None:
        rows = {**ROWS, "tokens": [2, 3, 0, 2]}
        advantages = advantages_of(batch_of(**rows, uids=list("pppq")), norm_adv_by_std_in_grpo=False)
        assert advantages[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0]

    def test_refusals(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"got:      'gae'\n  expected: grpo, grpo_vectorized, rloo,.*\n.*\n.*compute_advantage_fn",
        ):
            advantages_of(batch_of(**ROWS, uids=list("pppq")), adv_estimator="gae")
        disagreeing = {**ROWS, "rewards": [1.0, 0.5, 0.0, 1.0]}
        with pytest.raises(DisagreeingRewardsError, match=r"rollout a: rows 0, 1 have rewards 1, 0.5"):
            advantages_of(batch_of(**disagreeing, uids=list("pppq")))
        with pytest.raises(SampleError, match=r"rollout id of row 2\n  got:      None"):
            advantages_of(batch_of(**{**ROWS, "rollouts": ["a", "a", None, "c"]}, uids=list("pppq")))
        with pytest.raises(GroupingError, match="'group_index' is missing on row 3"):
            advantages_of(batch_of(**ROWS, uids=["p", "p", "p", None]))
        for name, where in (("rollout_id_list", "non_tensor_batch"), ("response_mask", "batch")):
            batch = batch_of(**ROWS, uids=list("pppq"))
            del getattr(batch, where)[name]
            with pytest.raises(SampleError, match=f"{name} in {where}\n  got:      no such field"):
                advantages_of(batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_are_counted_exactly_in_masks_of_any_dtype(dtype: torch.dtype) -> None:
    mask = torch.ones(2, 2049).to(dtype)  # as a sum in these dtypes 2048
    scaled = normalize_advantages_by_rollout(torch.ones(2, 2049), mask, ["a", "b"], divisor="rollouts")
    assert float(1 / scaled[0, 0]) == pytest.approx(2 * 2049, rel=1e-6)
