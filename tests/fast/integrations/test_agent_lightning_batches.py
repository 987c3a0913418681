"""Batches made by hand that Agent Lightning's drop-ins cannot take: each is named, with all of its rows."""

from typing import Any

import numpy as np
import pytest
import torch
from agent_lightning_rows import ROWS, Batch, advantages_of, batch_of
from torch import Tensor

from miles_norm.errors import ConfigError, MilesNormError, MissingRewardError, SampleError
from miles_norm.integrations.agent_lightning import (
    compute_rollout_level_advantage,
    convert_rollouts_to_train_data,
    normalize_advantages_by_rollout,
)

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
NAN, INF = torch.nan, torch.inf


def with_entries(*entries: tuple[int, int, float], base: Tensor = MASK) -> Tensor:
    changed = base.float()
    for row, token, value in entries:
        changed[row, token] = value
    return changed


class TestDivision:
    @pytest.mark.parametrize(
        "advantages",
        [
            torch.ones(3, 3, dtype=torch.int64),  # would come back as 0
            torch.ones(3, 3, dtype=torch.bool),
            torch.ones(3, 3, dtype=torch.complex64),
            torch.ones(3, 2),
            torch.ones(3, 1),  # would be stretched
            torch.ones(3),
            torch.ones(3, 3).to_sparse(),
            torch.ones(3, 3, device="meta"),
            [[1.0, 1.0, 1.0]] * 3,
            None,
        ],
    )
    def test_advantages_that_are_no_number_per_token(self, advantages: Any) -> None:
        with pytest.raises(SampleError, match=r"advantages\n(.*\n)  expected: floating-point numbers .* \[3, 3\]"):
            normalize_advantages_by_rollout(advantages, MASK, ["a", "a", "b"])

    @pytest.mark.parametrize("mask", [MASK[0], MASK[:, :, None], MASK.tolist(), MASK[:, :0], MASK + 0j])
    def test_masks_of_another_form(self, mask: Any) -> None:
        with pytest.raises(SampleError, match=r"response_mask\n(.*\n)  expected: a mask of 0 and 1, padded \[N, T\]"):
            normalize_advantages_by_rollout(torch.ones(3, 3), mask, ["a", "a", "b"])

    @pytest.mark.parametrize("entry", [2.0, -1.0, 0.5, NAN])
    def test_masks_with_other_entries(self, entry: float) -> None:
        mask = with_entries((0, 2, entry), (2, 0, entry))
        with pytest.raises(SampleError, match=f"response_mask of rows 0, 2\n  got: .*{entry:g}, {entry:g}\n") as error:
            normalize_advantages_by_rollout(torch.ones(3, 3), mask, ["a", "a", "b"])
        assert error.value.rows == (0, 2)

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    def test_advantages_of_trainable_tokens_are_finite(self, value: float) -> None:
        advantages = with_entries((1, 0, value), (2, 2, value))
        with pytest.raises(SampleError, match="advantages of rows 1, 2\n") as error:
            normalize_advantages_by_rollout(advantages, MASK, ["a", "a", "b"])
        assert error.value.rows == (1, 2)
        masked = normalize_advantages_by_rollout(with_entries((0, 2, value)), MASK, ["a", "a", "b"])
        assert torch.isfinite(masked[MASK.bool()]).all()

    @pytest.mark.parametrize("rows", [2.5, 3.0, True, False, NAN, 0, -1, "3", torch.tensor(3), 2**63])
    def test_numbers_of_rows_that_are_none(self, rows: Any) -> None:
        with pytest.raises(ConfigError, match=r"got:      num_trained_rows=.*\n  expected: at least 1, and a whole"):
            normalize_advantages_by_rollout(torch.ones(3, 3), MASK, ["a", "a", "b"], num_trained_rows=rows)
        assert normalize_advantages_by_rollout(
            torch.ones(3, 3), MASK, ["a", "a", "b"], num_trained_rows=np.int64(3)
        ).shape == (3, 3)

    @pytest.mark.parametrize("divisor", [["rollouts"], np.array(["rollouts", "rows"]), torch.ones(2), 1, ""])
    def test_divisors_that_are_none(self, divisor: Any) -> None:
        with pytest.raises(ConfigError, match="expected: 'trained_rows' or 'rollouts'"):
            normalize_advantages_by_rollout(torch.ones(3, 3), MASK, ["a", "a", "b"], divisor=divisor)

    @pytest.mark.parametrize(
        "ids",
        [
            None,
            "abc",
            5,
            {"a": 1, "b": 2, "c": 3},
            [True, True, False],
            [torch.ones(2)] * 3,
            [("a", torch.ones(2))] * 3,
        ],
    )
    def test_ids_that_are_none(self, ids: Any) -> None:
        with pytest.raises(SampleError, match=r"rollout (column|id of rows 0, 1, 2)\n"):
            normalize_advantages_by_rollout(torch.ones(3, 3), MASK, ids)

    def test_ids_in_tensors_are_the_numbers_in_them(self) -> None:
        ids = [torch.tensor(7), torch.tensor([7]), np.int64(3)]
        expected = normalize_advantages_by_rollout(torch.ones(3, 3), MASK, [7, 7, 3])
        assert torch.equal(normalize_advantages_by_rollout(torch.ones(3, 3), MASK, ids), expected)


class TestAdvantages:
    @pytest.mark.parametrize(
        ("where", "name", "value"),
        [
            ("batch", "response_mask", torch.ones(4, 2)),
            ("batch", "response_mask", torch.full((4, 3), 2.0)),
            ("batch", "response_mask", [[1, 1, 1]] * 4),
            ("batch", "token_level_rewards", torch.ones(4)),
            ("batch", "token_level_rewards", torch.ones(4, 1)),
            ("batch", "token_level_rewards", np.ones((4, 3))),
            ("non_tensor_batch", "rollout_id_list", np.array(["a", "b"], dtype=object)),
            ("non_tensor_batch", "rollout_id_list", "aabc"),
            ("non_tensor_batch", "data_id_list", 7),
            ("non_tensor_batch", "data_id_list", [["p"]] * 4),
        ],
    )
    def test_fields_that_do_not_fit(self, where: str, name: str, value: Any) -> None:
        batch = batch_of(**ROWS, uids=list("pppq"))
        getattr(batch, where)[name] = value
        with pytest.raises(SampleError, match=r"got: (.*\n)+  remedy: "):
            advantages_of(batch)
        assert "uid" not in batch.non_tensor_batch

    @pytest.mark.parametrize("value", [NAN, INF])
    def test_rewards_that_are_not_finite(self, value: float) -> None:
        batch = batch_of(**ROWS, uids=list("pppq"))
        batch.batch["token_level_rewards"][[1, 3], 0] = value
        with pytest.raises(MissingRewardError, match="reward of rows 1, 3") as error:
            advantages_of(batch)
        assert error.value.rows == (1, 3)

    @pytest.mark.parametrize("batch", [None, {}, Batch(None, {}), Batch({}, None)])  # type: ignore[arg-type]
    def test_what_is_no_batch(self, batch: Any) -> None:
        with pytest.raises(SampleError, match=r"got: .*\n  expected: (a DataProto|one entry per row)"):
            compute_rollout_level_advantage(batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=4)

    @pytest.mark.parametrize(
        "settings",
        [
            {"adv_estimator": ["grpo"]},
            {"adv_estimator": None},
            {"adv_estimator": "grpo", "compute_advantage_fn": "verl"},
            {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": "False"},
            {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": 1},
        ],
    )
    def test_settings_that_are_none(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"(adv_estimator|grpo_std_normalization)"):
            advantages_of(batch_of(**ROWS, uids=list("pppq")), **settings)

    @pytest.mark.parametrize(
        ("values", "match"),
        [
            (None, "advantages in batch\n  got:      no such field"),
            (torch.ones(3), r"advantages of compute_advantage_fn\n(.*\n)*.*\[3, 3\]"),
            (torch.full((3, 3), NAN), "advantages of rows 1, 2, 3\n"),
            (torch.full((3, 3), INF), "advantages of rows 1, 2, 3\n"),
        ],
    )
    def test_what_verls_function_gives_is_checked(self, values: Any, match: str) -> None:
        def computed(batch: Batch, **_: Any) -> Batch:
            batch.batch["advantages"] = values
            return batch

        with pytest.raises(SampleError, match=match):
            advantages_of(batch_of(**ROWS, uids=list("pppq")), compute_advantage_fn=computed)
        with pytest.raises(SampleError, match="what compute_advantage_fn returned\n  got:      4 rows\n  expected: 3"):
            advantages_of(
                batch_of(**ROWS, uids=list("pppq")),
                compute_advantage_fn=lambda batch, **_: batch_of(**ROWS, uids=list("pppq")),
            )


CALL: dict[str, Any] = {"prompt": {"token_ids": [1]}, "response": {"token_ids": [2], "log_probs": [-0.5]}}


class TestTraces:
    @pytest.mark.parametrize("log_probs", [[None], ["-0.5"], [NAN], [-INF], [[-0.5]], -0.5, "x"])
    def test_log_probs_that_are_none(self, log_probs: Any) -> None:
        """As float32 None would become NaN, and text a number."""
        bad = CALL | {"response": {"token_ids": [2], "log_probs": log_probs}}
        rollouts = [
            {"rollout_id": name, "data_id": "d", "final_reward": 1.0, "triplets": [call]}
            for name, call in (("a", bad), ("b", CALL), ("c", bad))
        ]
        with pytest.raises(SampleError, match="CompletedRollout: items 0, 2\n") as error:
            convert_rollouts_to_train_data(rollouts)
        assert error.value.rows == (0, 2)

    @pytest.mark.parametrize("rollouts", [None, 7, "ab", {"rollout_id": "a"}, torch.ones(2), [torch.ones(2)], [None]])
    def test_what_are_no_rollouts(self, rollouts: Any) -> None:
        with pytest.raises(SampleError, match="CompletedRollout"):
            convert_rollouts_to_train_data(rollouts)

    @pytest.mark.parametrize("level", [None, ["trajectory"], torch.ones(2), np.array(["a", "b"])])
    def test_levels_that_are_none(self, level: Any) -> None:
        with pytest.raises(MilesNormError, match="trace level"):
            convert_rollouts_to_train_data([], level=level)
