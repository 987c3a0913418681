"""Samples to train data: against what Miles and slime gave on real dumps, and every rule and error on small rows."""

import copy
import functools
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from golden_dumps import GOLDEN, dump_of

from miles_norm import (
    LossConfig,
    NormalizationConfig,
    Sample,
    convert_samples_to_train_data,
    loss_weights,
    normalize_rewards,
)
from miles_norm.conversion import train_data_from_result
from miles_norm.errors import SampleError
from miles_norm.train_data import TrainData

MILES_DUMPS = ["miles_session_v2.pt", "miles_mainstream.pt", "miles_multi_lora.pt"]

Row = dict[str, Any]


@functools.cache
def converted(name: str, **settings: Any) -> dict[str, Any]:
    dump = dump_of(name)
    config = NormalizationConfig(**settings)
    return convert_samples_to_train_data(dump.samples, config, dump.metadata).as_miles_dict()


def golden(name: str) -> dict[str, Any]:
    version = "slime" if name == "slime_dump.pt" else "miles_pr2369"
    parts: dict[str, Any] = GOLDEN[name][version]["convert_samples_to_train_data"]
    return parts


class TestGolden:
    @pytest.mark.parametrize("name", [*MILES_DUMPS, "slime_dump.pt"])
    def test_columns_that_agree_everywhere(self, name: str) -> None:
        upstream, ours = golden(name), converted(name)
        for key in ("truncated", "response_lengths"):
            assert ours[key] == upstream[key]
        assert [sum(mask) for mask in ours["loss_masks"]] == upstream["loss_mask_sums"]
        assert [len(mask) for mask in ours["loss_masks"]] == upstream["response_lengths"]

    @pytest.mark.parametrize("name", MILES_DUMPS)
    def test_keys_and_indices_of_miles(self, name: str) -> None:
        assert sorted(converted(name)) == golden(name)["keys"]
        assert converted(name)["sample_indices"] == golden(name)["sample_indices"]

    @pytest.mark.parametrize("name", MILES_DUMPS)
    @pytest.mark.parametrize(
        ("variant", "settings"),
        [("grpo_std_on", {}), ("grpo_no_normalization", {"rewards_normalization": False})],
    )
    def test_rewards(self, name: str, variant: str, settings: dict[str, Any]) -> None:
        upstream = GOLDEN[name]["miles_pr2369"]["post_process_rewards"][variant]
        ours = converted(name, **settings)
        assert ours["raw_reward"] == upstream["raw"]
        assert ours["rewards"] == pytest.approx(upstream["normalized"], rel=1e-6, abs=1e-6)

    @pytest.mark.parametrize("name", ["miles_session_v2.pt", "miles_mainstream.pt"])
    def test_rollouts_of_one_policy(self, name: str) -> None:
        assert converted(name)["rollout_ids"] == golden(name)["rollout_ids"]
        assert converted(name)["rollout_mask_sums"] == golden(name)["rollout_mask_sums"]

    def test_rollouts_of_several_adapters_are_kept_apart(self) -> None:
        """Miles goes by the id alone, which both adapters count from 0: its sums mix tokens of two policies."""
        upstream, ours = golden("miles_multi_lora.pt"), converted("miles_multi_lora.pt")
        differing = [n for n in range(25) if ours["rollout_mask_sums"][n] != upstream["rollout_mask_sums"][n]]
        assert len(differing) == 22
        sums: dict[Any, int] = {}
        keys = list(zip(ours["adapter_slots"], upstream["rollout_ids"], strict=True))
        for key, tokens in zip(keys, upstream["loss_mask_sums"], strict=True):
            sums[key] = sums.get(key, 0) + tokens
        assert len(sums) == 14
        assert ours["rollout_mask_sums"] == [sums[key] for key in keys]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        assert ours["rollout_ids"] == [numbers[key] for key in keys]

    def test_adapters(self) -> None:
        upstream, ours = golden("miles_multi_lora.pt"), converted("miles_multi_lora.pt")
        for key in ("adapter_slots", "step_slots", "step_adapter_names", "prompt_group_sizes"):
            assert ours[key] == upstream[key]
        assert ours["step_adapter_batch_sizes"] == {
            int(slot): size for slot, size in upstream["step_adapter_batch_sizes"].items()
        }

    def test_slime_invents_ids_for_rows_without_one(self) -> None:
        """It takes the lowest integers that no row uses, and leaves the index unread; the rollouts are the same."""
        upstream, ours = golden("slime_dump.pt"), converted("slime_dump.pt")
        assert ours["rollout_ids"] != upstream["rollout_ids"]
        assert len(set(zip(ours["rollout_ids"], upstream["rollout_ids"], strict=True))) == 24
        assert len(set(ours["rollout_ids"])) == len(set(upstream["rollout_ids"])) == 24
        assert ours["rollout_mask_sums"] == upstream["rollout_mask_sums"]
        # slime hands on the names of data sources, and not the versions of the policy.
        assert set(ours) ^ set(upstream["keys"]) == {"source_names", "weight_versions"}

    def test_no_dump_is_edited(self) -> None:
        for name in (*MILES_DUMPS, "slime_dump.pt"):
            before = copy.deepcopy(dump_of(name).samples)
            converted(name)
            assert dump_of(name).samples == before


def row(n: int = 0, **fields: Any) -> Row:
    """Rollout n of group n // 2 with a reward of its own: prompt 7, 8 and a response of three tokens."""
    plain = {
        "group_index": n // 2,
        "index": n,
        "reward": float(n % 2),
        "tokens": [7, 8, 10 + n, 20 + n, 30 + n],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
    }
    return plain | fields


def convert(rows: list[Any], metadata: dict[str, Any] | None = None, **settings: Any) -> TrainData:
    settings.setdefault("advantage_estimator", "dr_grpo")
    return convert_samples_to_train_data(rows, NormalizationConfig(**settings), metadata)


class TestRows:
    def test_columns_of_plain_rows(self) -> None:
        rows = [row(0), row(0, tokens=[1, 2], response_length=1, loss_mask=[1]), row(1, status="truncated")]
        assert convert(rows).as_miles_dict(own_columns=True) == {
            "tokens": [[7, 8, 10, 20, 30], [1, 2], [7, 8, 11, 21, 31]],
            "response_lengths": [3, 1, 3],
            "rewards": [-0.5, -0.5, 0.5],
            "raw_reward": [0.0, 0.0, 1.0],
            "truncated": [0, 0, 1],
            "sample_indices": [0, 0, 1],
            "rollout_ids": [0, 0, 1],
            "loss_masks": [[1, 0, 1], [1], [1, 0, 1]],
            "rollout_mask_sums": [3, 3, 2],
            # 1 / (2 rollouts * 3 tokens) and 1 / (2 * 2).
            "weights": [1 / 6, 1 / 6, 1 / 4],
            "trained": [True, True, True],
        }

    @pytest.mark.parametrize("kind", [Sample.from_dict, UserDict, dict, lambda fields: type("Row", (), fields)()])
    def test_rows_of_any_kind(self, kind: Any) -> None:
        rows = [row(n) for n in range(4)]
        assert convert([kind(fields) for fields in rows]).as_miles_dict() == convert(rows).as_miles_dict()

    def test_nested_input(self) -> None:
        rows = [row(0), row(1), row(2), row(3)]
        flat = convert(rows).as_miles_dict()
        assert convert([rows[:2], rows[2:]]).as_miles_dict() == flat
        in_lists = convert([[[rows[0]], [rows[1]]], [[rows[2]], [rows[3]]]]).as_miles_dict()
        assert in_lists == flat
        iterated = convert_samples_to_train_data(iter(rows), NormalizationConfig(advantage_estimator="dr_grpo"))
        assert iterated.as_miles_dict() == flat

    def test_lists_are_referred_to_and_nothing_is_edited(self) -> None:
        rows = [row(n, rollout_log_probs=[-0.5, -1.0, -1.5], metadata={"a": [n]}) for n in range(4)]
        rows[2]["remove_sample"], rows[3]["loss_mask"] = True, None
        before = copy.deepcopy(rows)
        data = convert(rows)
        fields = {"tokens": "tokens", "loss_mask": "loss_masks", "rollout_log_probs": "rollout_log_probs"}
        for field, column in fields.items():
            for n in (0, 1):
                assert data[column].row(n) is rows[n][field]
        out = data.as_miles_dict()
        assert out["tokens"][0] is rows[0]["tokens"]
        assert out["loss_masks"][2] == [0, 0, 0]
        data["tokens"].values.add_(1)  # the flat tensor is a copy of lists
        assert rows == before

    def test_arrays_and_tensors_are_views(self) -> None:
        for make in (np.array, torch.tensor):
            rows = [row(n, tokens=make([7, 8, 9, n])) for n in range(2)]
            data = convert(rows)
            assert all(data["tokens"].row(n) is rows[n]["tokens"] for n in range(2))
        flat = np.arange(8)
        data = convert([row(n, tokens=flat[4 * n : 4 * n + 4]) for n in range(2)])
        assert data["tokens"].values.data_ptr() == flat.ctypes.data

    def test_masks_of_every_kind_give_the_same_rows(self) -> None:
        kinds = [
            list, tuple, bytes, bytearray, np.array, lambda m: np.array(m, dtype=bool), lambda m: np.array(m, np.uint8),
            torch.tensor, lambda m: torch.tensor(m, dtype=torch.bool), lambda m: [bool(x) for x in m],
            lambda m: [float(x) for x in m],
        ]  # fmt: skip
        expected = convert([row(0), row(1, remove_sample=True)]).as_miles_dict()
        for kind in kinds:
            rows = [row(0, loss_mask=kind([1, 0, 1])), row(1, loss_mask=kind([1, 0, 1]), remove_sample=True)]
            data = convert(rows)
            assert data["loss_masks"].values.tolist() == [1, 0, 1, 0, 0, 0]
            assert data["rollout_mask_sums"].tolist() == expected["rollout_mask_sums"] == [2, 0]
        mixed = [row(n, loss_mask=kind([1, 0, 1])) for n, kind in enumerate(kinds)]
        assert convert(mixed)["loss_masks"].values.tolist() == [1, 0, 1] * len(kinds)

    def test_without_a_mask_the_whole_response_is_trained(self) -> None:
        data = convert([row(0, loss_mask=None), row(1)])
        assert data.as_miles_dict()["loss_masks"] == [[1, 1, 1], [1, 0, 1]]
        assert data["rollout_mask_sums"].tolist() == [3, 2]

    def test_response_length_can_be_that_of_the_mask(self) -> None:
        assert convert([row(0, response_length=None), row(1)])["response_lengths"].tolist() == [3, 3]


class TestStates:
    @pytest.mark.parametrize(
        ("rows", "settings", "emptied"),
        [
            ([row(0), row(1, remove_sample=True)], {}, [1]),
            ([row(0), row(0, is_padding=True), row(1)], {}, [1]),
            ([row(0), row(1, reward=None)], {"missing_reward": "exclude"}, [1]),
            ([row(0), row(1), row(2)], {"min_group_size": 2}, [2]),
            ([row(0), row(1, reward=0.0), row(2)], {"zero_variance_groups": "drop_from_loss"}, [0, 1, 2]),
            ([row(0), row(0, status="truncated"), row(1)], {"truncated_rollouts": "untrain"}, [0, 1]),
            ([row(0), row(1, reward=None)], {"missing_reward": "exclude", "rewards_normalization": False}, [1]),
        ],
        ids=["removed", "padding", "unscored", "small group", "zero variance", "truncated", "unscored, passed through"],
    )
    def test_rows_that_are_not_trained_have_zero_masks_and_weights(
        self, rows: list[Row], settings: dict[str, Any], emptied: list[int]
    ) -> None:
        data = convert(rows, **settings)
        for n in range(len(rows)):
            assert list(data.as_miles_dict()["loss_masks"][n]) == ([0, 0, 0] if n in emptied else [1, 0, 1])
        assert data["trained"].tolist() == [n not in emptied for n in range(len(rows))]
        assert (data["weights"] > 0).tolist() == data["trained"].tolist()

    def test_mask_sums_are_those_of_the_final_masks(self) -> None:
        rows = [row(0), row(0, remove_sample=True), row(0, is_padding=True), row(1, loss_mask=[0, 0, 0])]
        assert convert(rows)["rollout_mask_sums"].tolist() == [2, 2, 2, 0]

    def test_weights_are_the_loss_weights_of_the_result(self) -> None:
        rows = [row(0), row(0, loss_mask=[1, 1, 1]), row(1), row(2, remove_sample=True), row(3)]
        for loss in (LossConfig(), LossConfig(aggregation="token_mean"), LossConfig(aggregation="prompt_mean")):
            result = normalize_rewards(rows)
            data = train_data_from_result(rows, result, loss_config=loss)
            assert torch.equal(data["weights"], loss_weights(result, loss))
            assert torch.equal(data["trained"], result.trained_rows)
            masks = torch.tensor([sum(mask) for mask in data.as_miles_dict()["loss_masks"]])
            assert torch.equal(masks, result.trainable_tokens)


class TestIds:
    def test_ids_that_name_each_rollout_once_are_kept(self) -> None:
        assert convert([row(0, rollout_id=70), row(1, rollout_id=5)])["rollout_ids"].tolist() == [70, 5]

    @pytest.mark.parametrize("ids", [("a", "b", "a"), (2**70, 1, 2**70), (None, 3, None)])
    def test_other_ids_become_numbers(self, ids: tuple[Any, ...]) -> None:
        rows = [row(n, index=i, rollout_id=None) for n, i in enumerate(ids)]
        expected = [0, 1, 2] if ids[0] is None else [0, 1, 0]
        assert convert([dict(r, group_index=0, reward=1.0) for r in rows])["rollout_ids"].tolist() == expected

    def test_one_id_in_two_groups_is_two_rollouts(self) -> None:
        rows = [row(0, index=4), row(1, index=5), row(2, index=4), row(3, index=5)]
        assert convert(rows)["rollout_ids"].tolist() == [0, 1, 2, 3]

    def test_indices_that_are_no_integers_stay_as_they_are(self) -> None:
        assert convert([row(0, index="a"), row(1, index=None)])["sample_indices"] == ["a", None]


class TestOptionalFields:
    def test_token_fields(self) -> None:
        extra = {name: [-0.5, -1.0, -1.5] for name in ("rollout_log_probs", "teacher_log_probs", "opd_reverse_kl")}
        data = convert([row(0, **extra), row(1, **extra)])
        for name in extra:
            assert data[name].values.tolist() == [-0.5, -1.0, -1.5] * 2
            assert data[name].dtype == torch.float32

    def test_routed_experts_have_an_entry_for_every_token_but_the_first(self) -> None:
        experts = np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2)
        data = convert([row(n, rollout_routed_experts=experts, rollout_indexer_topk=experts) for n in range(2)])
        assert data["rollout_routed_experts"].row_shape == (2, 2)
        assert data.as_miles_dict()["rollout_indexer_topk"][1] is experts

    def test_fields_of_other_kinds(self) -> None:
        rows = [row(0, weight_versions=["3"], multimodal_train_inputs={"image": 1}, train_metadata={"a": 1}), row(1)]
        rows[1]["train_metadata"] = {"a": 2}
        out = convert(rows).as_miles_dict()
        assert out["weight_versions"] == [["3"], []]
        assert out["multimodal_train_inputs"] == [{"image": 1}, None]
        assert out["metadata"] == [{"a": 1}, {"a": 2}]
        assert not {"weight_versions", "multimodal_train_inputs"} & convert([row(0), row(1)]).as_miles_dict().keys()

    def test_metadata_entries_become_columns_and_raw_reward_replaces_the_reward(self) -> None:
        metadata = {"raw_reward": 9.5, "round_number": 2, "length_success": True, "other": 1}
        out = convert([row(n, metadata=dict(metadata, raw_reward=n)) for n in range(2)]).as_miles_dict()
        assert out["raw_reward"] == [0, 1]
        assert (out["round_number"], out["length_success"]) == ([2, 2], [True, True])
        assert "other" not in out

    def test_entries_of_the_step(self) -> None:
        step = {"prompt_group_sizes": [2, 2], "dynamic_global_batch_size": 4, "unknown": 1}
        data = convert([row(n, group_index=None) for n in range(4)], step)
        assert data.step == {"prompt_group_sizes": [2, 2], "dynamic_global_batch_size": 4}
        assert data["rewards"].tolist() == [-0.5, 0.5, -0.5, 0.5]

    def test_adapters(self) -> None:
        def of(name: str, slot: int, n: int) -> Row:
            return row(n, adapter={"name": name, "slot": slot}, metadata={"adapter_global_batch_size": 10 * slot})

        step = {"step_slots": [2, 1], "step_adapter_names": ["b", "a"]}
        data = convert([of("a", 1, 0), of("a", 1, 1), of("b", 2, 0), of("b", 2, 1)], step)
        assert data["adapter_slots"].tolist() == [1, 1, 2, 2]
        assert data.step == {
            "step_slots": [1, 2],
            "step_adapter_names": ["a", "b"],
            "step_adapter_batch_sizes": {1: 10, 2: 20},
        }
        unstepped = convert([of("a", 1, 0), row(1, adapter={"name": "b", "slot": 3})], {"step_slots": [1]})
        assert unstepped.step["step_adapter_batch_sizes"] == {1: 10}


# A list of rows of which some are wrong, and the start of the error that names all of these.
ERRORS = {
    "no tokens": ([row(0), row(1, tokens=None)], r"tokens of row 1\n.*row 1: no tokens for a response of 3"),
    "short tokens": (
        [row(0, tokens=[1, 2]), row(1), row(2, tokens=[])],
        r"tokens of rows 0, 2\n.*row 0: 2 tokens for a response of 3, row 2: 0 tokens",
    ),
    "mask": (
        [row(0, loss_mask=[1, 1]), row(1), row(2, loss_mask=[1] * 4)],
        r"loss_mask of rows 0, 2\n.*row 0: 2 entries, row 2: 4 entries\n.*row 0: 3, row 2: 3",
    ),
    "mask entries": ([row(0, loss_mask=[1, 2, 0])], r"trainable tokens of row 0\n.*other than 0 and 1"),
    "log-probs": (
        [row(0, rollout_log_probs=[0.5]), row(1, rollout_log_probs=[0.5] * 3)],
        r"rollout_log_probs of row 0\n.*row 0: 1 entries\n.*row 0: 3",
    ),
    "some log-probs": (
        [row(0), row(1, teacher_log_probs=[0.5] * 3), row(2)],
        r"teacher_log_probs of rows 0, 2\n.*None, while 1 other rows have it",
    ),
    "experts": (
        [row(0, rollout_routed_experts=np.zeros((5, 1, 1))), row(1, rollout_routed_experts=np.zeros((4, 1, 1)))],
        r"rollout_routed_experts of row 0\n.*row 0: 5 entries\n.*row 0: 4",
    ),
    "some train_metadata": ([row(0, train_metadata={}), row(1)], r"train_metadata of row 1\n"),
    "some metadata": (
        [row(0, metadata={"round_number": 1}), row(1, metadata={}), row(2)],
        r"metadata\['round_number'\] of rows 1, 2\n.*None, while 1 other",
    ),
    "some adapters": ([row(0, adapter={"name": "a", "slot": 0}), row(1)], r"adapter of row 1\n"),
    "no slot": ([row(0, adapter="a"), row(1, adapter={"name": "a"})], r"adapter of rows 0, 1\n.*the slot None"),
    "bad slot": ([row(0, adapter={"name": "a", "slot": "0"})], r"adapter of row 0\n.*the slot '0'"),
    "no batch size": (
        [row(0, adapter={"name": "a", "slot": 7}), row(1, adapter={"name": "a", "slot": 7}, metadata={})],
        r"metadata of rows 0, 1\n.*no adapter_global_batch_size",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_all_rows(case: str) -> None:
    rows, text = ERRORS[case]
    with pytest.raises(SampleError, match="(?s)" + text) as raised:
        convert(rows, {"step_slots": [7]}, group_key="group_index")
    assert raised.value.rows


def test_result_of_other_samples() -> None:
    rows = [row(n) for n in range(3)]
    with pytest.raises(SampleError, match=r"(?s)samples\n.*2 rows\n.*the 3 rows that the result was computed from"):
        train_data_from_result(rows[:2], normalize_rewards(rows))


@pytest.mark.parametrize("metadata", [5, "sizes", [8, 6]])
def test_metadata_that_is_no_mapping(metadata: Any) -> None:
    with pytest.raises(SampleError, match=r"^metadata\n.*type (int|str|list)\n"):
        convert_samples_to_train_data([row(0)], None, metadata)
