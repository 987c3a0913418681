"""The hooks of Miles and slime on real dumps, given what the trainers give them, against what the trainers computed."""

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from golden_dumps import GOLDEN, LAYOUT, POLICY, VARIANTS, dump_of
from trainer_samples import MilesSample, SlimeSample, prompt_group

from miles_norm import convert_samples_to_train_data as full_conversion
from miles_norm.errors import ConfigError, DisagreeingRewardsError, MissingRewardError
from miles_norm.integrations.miles import convert_samples_to_train_data, post_process_rewards

MILES_DUMPS = ["miles_session_v2.pt", "miles_mainstream.pt", "miles_multi_lora.pt"]
KINDS = {**dict.fromkeys(MILES_DUMPS, MilesSample), "slime_dump.pt": SlimeSample}
DEFAULTS = {
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "reward_key": None,
    "use_dynamic_global_batch_size": False,
    "global_batch_size": 24,
    **LAYOUT,
}


def samples_of(name: str) -> list[Any]:
    return [KINDS[name].from_dict(row) for row in dump_of(name).samples]


def args_of(**flags: Any) -> Namespace:
    return Namespace(**{**DEFAULTS, **flags})


@pytest.mark.parametrize(("name", "fields"), [(name, 29) for name in MILES_DUMPS] + [("slime_dump.pt", 30)])
def test_stand_ins_write_the_dumps_that_they_read(name: str, fields: int) -> None:
    assert len(dataclasses.fields(KINDS[name])) == fields
    rows = [{**row, "an attribute of somebody else": n} for n, row in enumerate(dump_of(name).samples)]
    assert [KINDS[name].from_dict(row).to_dict() for row in rows] == rows
    for sample in samples_of(name):
        assert sample.get_reward_value(args_of()) == sample.reward
        assert sample.effective_response_length == (
            sample.response_length if sample.loss_mask is None else sum(sample.loss_mask)
        )


def miles_results() -> Iterator[Any]:
    for name in MILES_DUMPS:
        for version in POLICY:
            for variant, upstream in GOLDEN[name][version]["post_process_rewards"].items():
                yield pytest.param(name, version, variant, upstream, id=f"{name}-{version}-{variant}")


@pytest.mark.parametrize(("name", "version", "variant", "upstream"), list(miles_results()))
def test_rewards_are_those_of_miles(
    name: str,
    version: str,
    variant: str,
    upstream: dict[str, Any],
    settings: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the multi-LoRA dump Miles used the recorded group sizes; the hook has the adapters."""
    settings(f"rollout_reward: {POLICY[version]}")
    args = args_of(**VARIANTS[variant])
    if "raises" in upstream:
        with pytest.raises(DisagreeingRewardsError, match=r"rollout 1: rows 2, 3, 4, 5 have rewards 1, 0, 0.25, 0.5"):
            post_process_rewards(args, samples_of(name))
        return
    if variant == "grpo_no_normalization":
        # Nothing is shared then, so upstream does not look at siblings either.
        monkeypatch.delenv("MILES_NORM_CONFIG")
    raw, rewards = post_process_rewards(args, samples_of(name))
    assert raw == upstream["raw"]
    assert rewards == pytest.approx(upstream["normalized"], rel=1e-6, abs=1e-6)
    assert {type(value) for value in (*raw, *rewards)} == {float}


def differences(ours: dict[str, Any], upstream: dict[str, Any]) -> set[str]:
    shown = {**ours, "loss_mask_sums": [sum(mask) for mask in ours["loss_masks"]], "keys": sorted(ours)}
    return {name for name, value in upstream.items() if shown.get(name) != value}


@pytest.mark.parametrize("name", ["miles_session_v2.pt", "miles_mainstream.pt"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_train_data_is_that_of_miles(name: str, variant: str) -> None:
    golden = GOLDEN[name]["miles_pr2369"]
    data = convert_samples_to_train_data(args_of(**VARIANTS[variant]), samples_of(name))
    assert differences(data, golden["convert_samples_to_train_data"]) == set()
    assert data["raw_reward"] == golden["post_process_rewards"][variant]["raw"]
    expected = golden["post_process_rewards"][variant]["normalized"]
    assert data["rewards"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert data["tokens"] == [row["tokens"] for row in dump_of(name).samples]
    assert data["rollout_log_probs"] == [row["rollout_log_probs"] for row in dump_of(name).samples]


def test_slime_differs_where_it_invents_ids_and_counts_rows() -> None:
    """Rollouts are the same 24; on fan-out its advantages are over rows, which tests/fast/test_golden.py shows."""
    golden = GOLDEN["slime_dump.pt"]["slime"]
    data = convert_samples_to_train_data(args_of(), samples_of("slime_dump.pt"))
    upstream = golden["convert_samples_to_train_data"]
    assert differences(data, upstream) == {"rollout_ids", "keys"}
    assert data["rollout_ids"] == upstream["sample_indices"]
    assert len(set(zip(data["rollout_ids"], upstream["rollout_ids"], strict=True))) == 24
    assert set(data) ^ set(upstream["keys"]) == {"source_names", "weight_versions"}
    one_each = golden["one_row_per_rollout_n4_b6"]
    rewards = [data["rewards"][row] for row in one_each["row_indices"]]
    assert rewards == pytest.approx(one_each["grpo_std_on"]["normalized"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rewards_of_slime_with_one_row_per_rollout(variant: str) -> None:
    golden = GOLDEN["slime_dump.pt"]["slime"]["one_row_per_rollout_n4_b6"]
    samples = samples_of("slime_dump.pt")
    raw, rewards = post_process_rewards(args_of(**VARIANTS[variant]), [samples[n] for n in golden["row_indices"]])
    assert raw == golden[variant]["raw"]
    assert rewards == pytest.approx(golden[variant]["normalized"], rel=1e-6, abs=1e-6)


def test_a_multi_lora_step_goes_through_the_reward_hook_or_the_full_conversion() -> None:
    samples, metadata = samples_of("miles_multi_lora.pt"), dump_of("miles_multi_lora.pt").metadata
    with pytest.raises(ConfigError, match=r"--multi-lora-n-adapters \(rows 0, 1, .* and 5 more with an adapter\)"):
        convert_samples_to_train_data(args_of(), samples)
    data = full_conversion(samples, metadata=metadata).as_miles_dict()
    assert data["rewards"] == post_process_rewards(args_of(), samples)[1]
    assert data["step_slots"] == metadata["step_slots"]


def test_equal_rewards_are_exactly_zero_where_float32_leaves_a_residue() -> None:
    """The intended difference of docs/integrations/miles.md: float32 gives 0.056 for seven times 0.7."""
    rewards = torch.full((7,), 0.7)
    residue = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert residue.abs().max() == pytest.approx(0.056, abs=0.001)
    samples = [MilesSample(group_index=0, index=n, reward=0.7, response_length=1) for n in range(7)]
    assert post_process_rewards(args_of(), samples)[1] == [0.0] * 7


def test_an_unscored_row_is_an_error_that_names_all_rows() -> None:
    with pytest.raises(MissingRewardError, match=r"reward of rows 1, 2\n  got:      row 1: None, status pending"):
        post_process_rewards(args_of(), prompt_group(1.0, None, None))


def test_one_id_in_two_groups_is_two_rollouts() -> None:
    """As rollouts of two prompts: rewards 1, 0 and 0, 1 are each their own group of two, with ids of their own."""
    samples = prompt_group(1.0, 0.0) + prompt_group(0.0, 1.0)
    samples[2].group_index = samples[3].group_index = 1
    args = args_of(grpo_std_normalization=False)
    assert post_process_rewards(args, samples)[1] == [0.5, -0.5, -0.5, 0.5]
    data = convert_samples_to_train_data(args, samples)
    assert (data["rollout_ids"], data["rollout_mask_sums"]) == ([0, 1, 2, 3], [2, 2, 2, 2])


def test_what_the_trainer_does_next_works() -> None:
    """It packs columns into arrays, moves rewards into a float32 tensor, and picks rows for each rank."""
    data = convert_samples_to_train_data(args_of(), samples_of("miles_mainstream.pt"))
    for name in ("response_lengths", "truncated", "sample_indices", "rollout_ids", "rollout_mask_sums"):
        assert isinstance(data[name], list)
        assert {type(value) for value in data[name]} == {int}
        assert np.asarray(data[name]).dtype == np.int64
    for name in ("rewards", "raw_reward"):
        assert {type(value) for value in data[name]} == {float}
        assert torch.tensor(data[name], dtype=torch.float32).shape == (58,)
    lengths = data["response_lengths"]
    for name, dtype in (("tokens", np.int32), ("loss_masks", np.int32), ("rollout_log_probs", np.float32)):
        assert {type(row) for row in data[name]} == {list}
        flat = np.concatenate([np.asarray(row, dtype=dtype) for row in data[name]])
        assert name == "tokens" or len(flat) == sum(lengths)
    ranks = [range(rank, 58, 2) for rank in range(2)]
    shards = [{name: [column[row] for row in rank] for name, column in data.items()} for rank in ranks]
    assert [len(shard["tokens"]) for shard in shards] == [29, 29]
    assert all(isinstance(column, list) for column in data.values())


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        *((post_process_rewards, name) for name in KINDS),
        *((convert_samples_to_train_data, name) for name in KINDS if name != "miles_multi_lora.pt"),
    ],
)
def test_samples_are_read_and_never_changed(hook: Any, name: str) -> None:
    samples = samples_of(name)
    before = copy.deepcopy(samples)
    hook(args_of(), samples)
    assert samples == before
