"""Sample, and the stand-ins that unpickle in place of Miles' own classes."""

import copyreg
import enum
import pickle
import subprocess
import sys

import pytest

from miles_norm.errors import SampleError
from miles_norm.samples import AdapterRef, RewardSpec, Sample

# fmt: off
MILES_FIELDS = [
    "group_index", "index", "rollout_id", "prompt", "tokens", "multimodal_inputs", "multimodal_train_inputs",
    "response", "response_length", "label", "reward", "loss_mask", "weight_versions", "rollout_log_probs",
    "rollout_routed_experts", "rollout_indexer_topk", "remove_sample", "teacher_log_probs", "opd_reverse_kl",
    "status", "metadata", "generate_function_path", "train_metadata", "adapter", "reward_spec", "routing_key",
    "non_generation_time", "spec_info", "prefix_cache_info",
]
# fmt: on


class Status(enum.Enum):
    TRUNCATED = "truncated"


def test_fields_are_those_of_miles():
    assert list(Sample().to_dict()) == MILES_FIELDS
    assert len(MILES_FIELDS) == 29


def test_defaults_are_not_shared_between_samples():
    Sample().tokens.append(1)
    assert Sample().tokens == []


def test_from_dict_takes_values_as_they_are():
    tokens, mask = [1, 2, 3], [0, 1]
    sample = Sample.from_dict({"tokens": tokens, "loss_mask": mask, "index": 0, "rollout_id": None})
    assert sample.tokens is tokens
    assert sample.loss_mask is mask
    assert sample.index == 0
    assert sample.rollout_id is None
    assert sample.to_dict()["tokens"] is tokens


def test_unknown_keys_survive_the_round_trip():
    row = {**Sample().to_dict(), "session_id": "s", "extra": {"a": 1}}
    sample = Sample.from_dict(row)
    assert sample.extra == {"session_id": "s", "extra": {"a": 1}}
    assert sample.to_dict() == row


def test_is_padding_is_written_for_padding_rows_only():
    assert "is_padding" not in Sample().to_dict()
    row = Sample(is_padding=True).to_dict()
    assert row["is_padding"] is True
    assert Sample.from_dict(row).is_padding


@pytest.mark.parametrize("status", ["truncated", "TRUNCATED", Status.TRUNCATED])
def test_status_becomes_a_lower_case_string(status):
    assert Sample.from_dict({"status": status}).status == "truncated"


@pytest.mark.parametrize("status", [None, 3])
def test_status_that_is_no_string(status):
    with pytest.raises(SampleError, match=r"status of a row\n  got: +a value of type (NoneType|int)"):
        Sample.from_dict({"status": status})


def test_row_that_is_no_mapping():
    with pytest.raises(SampleError, match="a value of type list"):
        Sample.from_dict([1])


def test_extra_may_not_hold_a_field():
    with pytest.raises(SampleError, match=r"got: +the keys reward, tokens"):
        Sample(extra={"tokens": [], "reward": 1.0}).to_dict()


@pytest.mark.parametrize(
    "state",
    [
        {"name": "a", "slot": 2},
        {"name": "a", "slot": 2, "later": 1},
        ["a", 2],
        ("a", 2),
        (None, {"name": "a", "slot": 2}),
    ],
    ids=["dict", "dict of a later version", "list", "tuple", "slots"],
)
def test_stand_in_takes_every_pickled_state(state):
    # What an unpickler does with copyreg.__newobj__ and BUILD.
    reference = copyreg.__newobj__(AdapterRef)
    reference.__setstate__(state)
    assert reference == AdapterRef("a", 2)


@pytest.mark.parametrize("state", [None, 3, ["a", 2, 3], {"name": ["a"]}, {"slot": print}])
def test_stand_in_refuses_other_states(state):
    with pytest.raises(SampleError, match="name and slot, each a string, an integer or None"):
        copyreg.__newobj__(AdapterRef).__setstate__(state)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_references_pickle_and_hash(protocol):
    for reference in (AdapterRef("a", 0), RewardSpec("math", None)):
        assert pickle.loads(pickle.dumps(reference, protocol)) == reference
        assert hash(reference) == hash(pickle.loads(pickle.dumps(reference, protocol)))


def test_rows_need_neither_torch_nor_numpy():
    code = "import sys, miles_norm.samples, miles_norm.dumps; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
