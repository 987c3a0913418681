"""Groups that arrive in pieces get the bits that they have in a batch; late and incomplete ones go by their policy."""

import logging
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_norm import NormalizationConfig, RolloutColumns, StreamConfig, StreamingNormalizer, normalize_columns
from miles_norm.config import EstimatorOptions
from miles_norm.errors import ConfigError, GroupingError, MissingRewardError, RewardError, SampleError

DR_GRPO = NormalizationConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo")


def rows(*given: tuple[Any, Any, float], **more: Any) -> RolloutColumns:
    """Rows of (group, rollout, reward)."""
    group, rollout, reward = (list(column) for column in zip(*given, strict=True))
    return RolloutColumns(group=group, rollout=rollout, reward=reward, trainable_tokens=[1] * len(given), **more)


def taken(stream: StreamingNormalizer) -> dict[Hashable, list[float]]:
    return {group.group_id: [a for part in group.parts for a in part.advantages.tolist()] for group in stream.take()}


@st.composite
def pieces(draw: Any) -> tuple[list[tuple[Any, Any, float, int]], list[list[int]]]:
    """Rows of groups with three rollouts each, the last of which may lack some, and rollouts in calls in any order."""
    table: list[tuple[Any, Any, float, int]] = []
    rollouts: list[list[int]] = []
    named = draw(st.booleans())
    for group in range(draw(st.integers(1, 4))):
        for rollout in range(3):
            reward = draw(st.sampled_from([0.0, 1.0, 0.7, -0.25, 0.1]))
            fan_out = draw(st.integers(1, 3))
            rollouts.append(list(range(len(table), len(table) + fan_out)))
            name = f"{group}/{rollout}" if named else rollout
            table += [(f"g{group}" if named else group, name, reward, draw(st.integers(0, 5))) for _ in range(fan_out)]
    order = draw(st.permutations(rollouts))
    ends = sorted(draw(st.sets(st.integers(1, len(order) - 1))))
    calls = [order[start:stop] for start, stop in zip([0, *ends], [*ends, len(order)], strict=True)]
    return table, [draw(st.permutations([row for rollout in call for row in rollout])) for call in calls]


def columns_of(table: list[tuple[Any, Any, float, int]]) -> RolloutColumns:
    names = ("group", "rollout", "reward", "trainable_tokens")
    return RolloutColumns(**{name: list(column) for name, column in zip(names, zip(*table, strict=True), strict=True)})


def test_what_is_no_config_and_no_columns_is_refused() -> None:
    with pytest.raises(ConfigError, match="a NormalizationConfig"):
        StreamingNormalizer({"n_samples_per_prompt": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a StreamConfig"):
        StreamingNormalizer(DR_GRPO, "drop")  # type: ignore[arg-type]
    stream = StreamingNormalizer(DR_GRPO)
    for call in (stream.add, normalize_columns):
        with pytest.raises(SampleError, match=r"columns\n.*type list\n.*RolloutColumns"):
            call([{"reward": 1.0}])  # type: ignore[arg-type]


@pytest.mark.parametrize("buffered", [False, True])
@given(problem=pieces(), estimator=st.sampled_from(["grpo", "rloo", "opo", "pass_at_k", "ppo"]))
def test_bits_of_the_batch(buffered: bool, problem: Any, estimator: str) -> None:
    table, calls = problem
    options = EstimatorOptions(whitening="rollout") if buffered and estimator != "ppo" else EstimatorOptions()
    config = NormalizationConfig(n_samples_per_prompt=3, advantage_estimator=estimator, options=options)
    expected = normalize_columns(columns_of(table), config)
    stream = StreamingNormalizer(config, StreamConfig(batch_stage="buffer" if buffered else "refuse"))
    found = torch.full((len(table),), torch.nan)
    for number, call in enumerate(calls):
        stream.add(columns_of([table[row] for row in call]), number)
    report = stream.end_step()
    groups = stream.take()
    for group in groups:
        assert group.complete
        for part in group.parts:
            found[torch.tensor(calls[part.payload])[part.rows]] = part.advantages
            tokens = [table[calls[part.payload][row]][3] for row in part.rows.tolist()]
            assert part.trained.tolist() == [count > 0 for count in tokens]
    assert torch.equal(found.view(torch.int32), expected.advantages.view(torch.int32))
    assert sorted(str(group.group_id) for group in groups) == sorted(map(str, expected.index.group_ids))
    assert (report.normalized, report.dropped, report.carried) == (len(groups), (), ())


def test_a_group_is_handed_out_when_its_last_rollout_arrives() -> None:
    stream = StreamingNormalizer(DR_GRPO)
    assert stream.add(rows((0, 0, 1.0), (1, 0, 5.0))) == 0
    assert stream.take() == []
    # Group 1 with rewards 5, 3: mean 4 and deviation sqrt(2).
    assert stream.add(rows((1, 1, 3.0), (1, 1, 3.0)), "b") == 1
    [group] = stream.take()
    assert (group.group_id, group.complete, group.mean, group.std) == (1, True, 4.0, pytest.approx(2**0.5))
    first, second = group.parts
    assert (first.payload, first.rows.tolist(), first.advantages.tolist()) == (None, [1], [1.0])
    assert (second.payload, second.rows.tolist(), second.advantages.tolist()) == ("b", [0, 1], [-1.0, -1.0])
    assert stream.take() == []


@pytest.mark.parametrize(
    ("policy", "advantages", "dropped", "carried"),
    [
        ("carry", {}, (), (7,)),
        ("normalize", {7: [0.0]}, (), ()),
        ("drop", {}, ((7, ("x",), "incomplete"),), ()),
    ],
)
def test_groups_that_stay_incomplete(policy: Any, advantages: Any, dropped: Any, carried: Any) -> None:
    stream = StreamingNormalizer(DR_GRPO, StreamConfig(incomplete_groups=policy, late_rollouts="drop"))
    stream.add(rows((7, "x", 1.0), (8, "x", 1.0), (8, "y", 0.0)))
    report = stream.end_step()
    assert report.normalized == 1 + len(advantages)
    assert tuple((each.group_id, each.rollout_ids, each.reason) for each in report.dropped) == dropped
    assert report.carried == carried
    groups = stream.take()
    assert {group.group_id: group.complete for group in groups} == {8: True} | dict.fromkeys(advantages, False)
    # The rest of the group comes in the next step.
    stream.add(rows((7, "y", 0.0)))
    report = stream.end_step()
    if policy == "carry":
        assert taken(stream) == {7: [0.5, -0.5]}
    else:
        assert [(each.group_id, each.rollout_ids, each.reason) for each in report.dropped] == [(7, ("y",), "late")]
        assert taken(stream) == {}


def test_late_rollouts_are_an_error_or_dropped() -> None:
    late = rows((0, 2, 9.0), (1, 0, 0.0))
    strict, lenient = (StreamingNormalizer(DR_GRPO, StreamConfig(late_rollouts=p)) for p in ("error", "drop"))
    for stream in (strict, lenient):
        stream.add(rows((0, 0, 1.0), (0, 1, 0.0)))
    with pytest.raises(GroupingError, match=r"late rollouts of prompt group 0\n  got:      rollout 2\n") as caught:
        strict.add(late)
    assert caught.value.rows == (0,)
    lenient.add(late)
    for stream, carried in ((strict, ()), (lenient, (1,))):
        report = stream.end_step()
        # Of the call that failed nothing was taken in; of the other one group 1 was.
        assert report.carried == carried
        assert taken(stream) == {0: [0.5, -0.5]}
    assert len(report.dropped) == 1


@pytest.mark.parametrize("remembered", [0, 1, 2])
def test_an_id_names_a_new_group_once_the_old_one_is_forgotten(remembered: int) -> None:
    stream = StreamingNormalizer(DR_GRPO, StreamConfig(remembered_steps=remembered))
    stream.add(rows((0, 0, 1.0), (0, 1, 0.0)))
    for _ in range(remembered):
        stream.end_step()
        with pytest.raises(GroupingError, match="late rollouts"):
            stream.add(rows((0, 0, 4.0), (0, 1, 2.0)))
    stream.end_step()
    assert stream.add(rows((0, 0, 4.0), (0, 1, 2.0))) == 2


def test_rows_of_a_rollout_come_in_one_call() -> None:
    stream = StreamingNormalizer(DR_GRPO)
    stream.add(rows((0, "a", 1.0), (0, "a", 1.0)))
    with pytest.raises(GroupingError, match="rollout a of prompt group 0") as caught:
        stream.add(rows((3, "b", 1.0), (0, "a", 1.0)))
    assert caught.value.rows == (1,)
    assert stream.end_step().carried == (0,)


def test_rows_without_a_rollout_id_are_rollouts_of_their_own() -> None:
    stream = StreamingNormalizer(DR_GRPO)
    stream.add(RolloutColumns(group=[0], rollout=None, reward=[1.0], trainable_tokens=[1]))
    assert stream.add(RolloutColumns(group=[0], rollout=None, reward=[0.0], trainable_tokens=[1])) == 1


def test_adapters_and_padding() -> None:
    stream = StreamingNormalizer(DR_GRPO)
    # Group 0 of two adapters is two groups; a padding row is no rollout.
    assert stream.add(rows((0, 0, 1.0), (0, 0, 3.0), adapter=["x", "y"])) == 0
    assert stream.add(rows((0, 1, 0.0), (0, 1, 0.0), adapter=["x", "x"], padding=[True, False])) == 1
    assert taken(stream) == {("x", 0): [0.5, -0.5, -0.5]}


def test_the_oldest_group_makes_room() -> None:
    stream = StreamingNormalizer(DR_GRPO, StreamConfig(incomplete_groups="drop", max_open_groups=2))
    for group in range(4):
        stream.add(rows((group, 0, 1.0)))
    stream.add(rows((2, 1, 0.0)))
    report = stream.end_step()
    # Groups 0 and 1 were dropped while others came; group 3 at the end.
    assert [each.group_id for each in report.dropped] == [0, 1, 3]
    assert taken(stream) == {2: [0.5, -0.5]}


def test_settings_that_need_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    config = DR_GRPO.model_copy(update={"options": EstimatorOptions(whitening="token")})
    with pytest.raises(ConfigError, match=r"options\.whitening='token'"):
        StreamingNormalizer(config)
    gdpo = NormalizationConfig(
        n_samples_per_prompt=2, advantage_estimator="gdpo", options=EstimatorOptions(gdpo_components=("a",))
    )
    with pytest.raises(ConfigError, match="advantage_estimator='gdpo'"):
        StreamingNormalizer(gdpo)
    with caplog.at_level(logging.WARNING, "miles_norm"):
        stream = StreamingNormalizer(config, StreamConfig(batch_stage="buffer"))
    assert "groups are held back until end_step" in caplog.text
    assert stream.add(rows((0, 0, 1.0), (0, 1, 0.0))) == 0
    assert stream.take() == []
    assert stream.end_step().normalized == 1
    assert len(stream.take()) == 1


def test_what_a_stream_has_to_know() -> None:
    with pytest.raises(ConfigError, match="no n_samples_per_prompt"):
        StreamingNormalizer(NormalizationConfig())
    stream = StreamingNormalizer(DR_GRPO)
    with pytest.raises(GroupingError, match="prompt groups"):
        stream.add(RolloutColumns(group=None, rollout=[0], reward=[1.0], trainable_tokens=[1]))
    nested = rows((0, 0, 1.0))
    nested.nested_sizes = (1,)
    with pytest.raises(GroupingError, match="nested rows"):
        stream.add(nested)
    for settings, text in (
        ({"max_open_groups": 3}, "max_open_groups=3 with incomplete_groups='carry'"),
        ({"max_open_groups": 3, "incomplete_groups": "drop", "batch_stage": "buffer"}, "batch_stage='buffer'"),
    ):
        with pytest.raises(ConfigError, match=text):
            StreamConfig(**settings)


def test_rewards_that_cannot_be_used() -> None:
    stream = StreamingNormalizer(DR_GRPO)
    with pytest.raises(MissingRewardError, match="reward of row 1"):
        stream.add(rows((0, 0, 1.0), (0, 1, float("nan"))))
    assert stream.end_step().carried == ()
    # A negative reward is an error of maxrl; it spoils its own group alone.
    stream = StreamingNormalizer(NormalizationConfig(n_samples_per_prompt=2, advantage_estimator="maxrl"))
    with pytest.raises(RewardError, match="rollout a"):
        stream.add(rows((0, "a", -1.0), (0, "b", 1.0), (1, "c", 1.0), (1, "d", 0.0)))
    report = stream.end_step()
    assert (report.normalized, [each.group_id for each in report.dropped]) == (1, [0])
    assert "maxrl" in report.dropped[0].reason or "negative" in report.dropped[0].reason
    assert taken(stream) == {1: [1.0, -1.0]}
