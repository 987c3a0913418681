"""Pickers and post-processors, on our rows and on objects as Miles' server hands them out."""

import functools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conversations import Session, user

from miles_norm import Sample
from miles_norm.errors import HookError
from miles_norm.session.assembly import assemble
from miles_norm.session.hook_runs import pick
from miles_norm.session.hooks import assign_reward, drop_retries, keep_all, leaf_rewards, mask_ownership


def tree(*parents: int | None) -> dict[str, Any]:
    """Session metadata of nodes with these parents; the span of node n is [3 d, 3 d + 2] at depth d."""
    nodes: list[dict[str, Any]] = []
    for seq, parent in enumerate(parents):
        start = 3 if parent is None else nodes[parent]["completion_span"][0] + 3
        span = [start, start + 2]
        nodes.append({"id": seq, "parent": parent, "seq": seq, "completion_span": span, "response_id": f"r{seq}"})
    return {"tree": {"nodes": nodes, "leaves": []}}


def leaf(metadata: dict[str, Any], seq: int, kind: type = SimpleNamespace) -> Any:
    """A leaf with lists, as Miles has it: three prompt tokens, then two of every three response tokens sampled."""
    nodes, path, step = metadata["tree"]["nodes"], [], seq
    while step is not None:
        path.insert(0, step)
        step = nodes[step]["parent"]
    mask = ([1, 1, 0] * len(path))[:-1]
    place = {"node_id": seq, "parent": nodes[seq]["parent"], "path_node_ids": path, "response_id": f"r{seq}"}
    return kind(
        tokens=[0] * (3 + len(mask)), response_length=len(mask), loss_mask=mask, reward=None, metadata={"leaf": place}
    )


def names(samples: list[Any]) -> list[int]:
    return [sample.metadata["leaf"]["node_id"] for sample in samples]


# 0 - 1 - 2    4 and 5 are trees of their own; 3 came after 2 and continues 0 as 1 does.
#   \ 3
SHAPE = (None, 0, 1, 0, None, None)


def test_keep_all_orders_the_leaves() -> None:
    metadata = tree(*SHAPE)
    assert names(keep_all([leaf(metadata, n) for n in (2, 3, 4, 5)], metadata)) == [2, 3, 5, 4]


def test_drop_retries() -> None:
    metadata = tree(*SHAPE)
    # Leaf 2's own parent has no later child; that its grandparent has one makes it a branch and no retry.
    assert names(drop_retries([leaf(metadata, n) for n in (2, 3, 4, 5)], metadata)) == [2, 3, 5, 4]
    # 1 was tried three times, and the last attempt goes on.
    metadata = tree(None, 0, 0, 0, 3)
    assert names(drop_retries([leaf(metadata, n) for n in (1, 2, 4)], metadata)) == [4]
    # A later child whose leaf is not among the samples supersedes as well.
    assert names(drop_retries([leaf(metadata, 2)], metadata)) == []
    # Parallel branches of one turn look like retries.
    metadata = tree(None, 0, 0)
    assert names(drop_retries([leaf(metadata, n) for n in (1, 2)], metadata)) == [2]


@pytest.mark.parametrize("kind", [SimpleNamespace, Sample])
def test_mask_ownership(kind: type) -> None:
    metadata = tree(None, 0, 0)
    samples = [leaf(metadata, 2, kind), leaf(metadata, 1, kind)]
    given = [sample.loss_mask for sample in samples]
    assert mask_ownership(samples, metadata) == samples
    # Positions 3 and 4 are node 0's, 6 and 7 those of the leaf; the response begins at 3.
    assert [sample.loss_mask for sample in samples] == [[0, 0, 0, 1, 1], [1, 1, 0, 1, 1]]
    assert given == [[1, 1, 0, 1, 1]] * 2


def test_mask_ownership_of_arrays_and_of_no_mask() -> None:
    metadata = tree(None, 0, 0)
    samples = [leaf(metadata, n) for n in (1, 2)]
    samples[1].loss_mask = np.array(samples[1].loss_mask, np.uint8)
    mask_ownership(samples, metadata)
    assert samples[1].loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert samples[1].loss_mask.dtype == np.uint8
    samples[1].loss_mask = None
    mask_ownership(samples, metadata)
    assert samples[1].loss_mask == [0, 0, 1, 1, 1]


def test_mask_ownership_of_cut_rows() -> None:
    """Node 1 is shared and lies behind the end of both rows."""
    metadata = tree(None, 0, 1, 1)
    samples = [leaf(metadata, n) for n in (2, 3)]
    for sample in samples:
        sample.tokens, sample.response_length, sample.loss_mask = [0] * 5, 2, [1, 1]
    mask_ownership(samples, metadata)
    assert [sample.loss_mask for sample in samples] == [[1, 1], [0, 0]]


def test_assign_reward() -> None:
    metadata = tree(None, None)
    samples = [leaf(metadata, n) for n in (0, 1)]
    assert assign_reward(samples, metadata | {"agent": {"reward": 0.5}}) == samples
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    for agent in ({}, {"other": 1}, None):
        assign_reward(samples, metadata | {"agent": agent})
    assign_reward(samples, metadata)
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assign_reward(samples, metadata | {"agent": {"reward": None}})
    assert [sample.reward for sample in samples] == [None, None]


def test_leaf_rewards() -> None:
    metadata = tree(*SHAPE)
    samples = [leaf(metadata, n) for n in (2, 3, 4)]
    # r5 was not picked, r0 is no leaf.
    agent = {"rewards": {"r3": 1.0, "r4": {"right": 1}, "r5": 9.0, "r0": 9.0}}
    assert leaf_rewards(samples, metadata | {"agent": agent}) == samples
    assert [sample.reward for sample in samples] == [None, 1.0, {"right": 1}]
    assert leaf_rewards(samples, metadata) == samples
    with pytest.raises(HookError, match=r"got: +response ids r7, rx, which no turn of the session has"):
        leaf_rewards(samples, metadata | {"agent": {"rewards": {"rx": 1.0, "r3": 0.0, "r7": 1.0}}})


def rows() -> tuple[list[Sample], dict[str, Any]]:
    metadata = tree(*SHAPE)
    return [leaf(metadata, n, Sample) for n in (2, 3, 4, 5)], metadata


def test_a_picker_selects() -> None:
    samples, metadata = rows()
    picked = pick(lambda leaves, _: leaves[::-2], samples, metadata)
    assert [id(sample) for sample in picked] == [id(samples[3]), id(samples[1])]


def set_mask(leaves: list[Sample], _: Any) -> list[Sample]:
    leaves[1].loss_mask[0] = 0
    leaves[3].reward = 1.0
    leaves[3].status = "failed"
    return leaves


def set_metadata(leaves: list[Sample], _: Any) -> list[Sample]:
    del leaves.pop(0).metadata["leaf"]["parent"]
    return leaves


def set_tree(leaves: list[Sample], metadata: dict[str, Any]) -> list[Sample]:
    metadata["tree"]["nodes"][0]["completion_span"][0] -= 1
    return leaves


def invent(leaves: list[Sample], _: Any) -> list[Sample]:
    return [*leaves, Sample(metadata=leaves[0].metadata)]


@pytest.mark.parametrize(
    ("picker", "text"),
    [
        (set_mask, r"picker set_mask\n +got: +it edited the loss_mask of leaf 3; the reward, status of leaf 5"),
        # Also of a leaf that it does not return.
        (set_metadata, "it edited the metadata of leaf 2"),
        (set_tree, "it edited session_metadata"),
        (invent, "it invented 1 of 5 samples"),
        (lambda leaves, _: [leaves[0], leaves[1], leaves[0]], "it returned leaf 2 more than once"),
        (lambda leaves, _: [Sample.from_dict(one.to_dict()) for one in leaves], "it invented 4 of 4 samples"),
    ],
)
def test_a_picker_that_does_more_than_select(picker: Any, text: str) -> None:
    with pytest.raises(HookError, match=text):
        pick(picker, *rows())


async def later(leaves: list[Sample], _: Any) -> list[Sample]:
    return leaves


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (lambda leaves, _: None, r"hook <lambda>\n +got: +a value of type NoneType"),
        (lambda leaves, _: tuple(leaves), "type tuple"),
        (later, r"hook later\n +got: +a value of type coroutine"),
        (functools.partial(later), r"hook functools.partial\(.*type coroutine"),
    ],
)
def test_hooks_that_return_no_list(hook: Any, text: str) -> None:
    session = Session()
    session.turn([user("a")], "b")
    for settings in ({"picker": hook}, {"post_processors": [hook]}):
        with pytest.raises(HookError, match=re.compile(text, re.DOTALL)):
            assemble(session.forest, Sample(index=0), **settings)


def test_a_list_that_a_picker_empties_is_its_own() -> None:
    samples, metadata = rows()
    assert pick(lambda leaves, _: [leaves.pop()], samples, metadata) == [samples[-1]]
    assert len(samples) == 4


def test_edits_of_arrays_are_seen() -> None:
    session = Session()
    first = session.turn([user("a")], "b")
    session.turn(session.then(first, "c"), "d")

    def edit(leaves: list[Sample], _: Any) -> list[Sample]:
        leaves[0].tokens[0] += 1
        leaves[0].rollout_log_probs[0] = np.nan
        return leaves

    with pytest.raises(HookError, match="it edited the tokens, rollout_log_probs of leaf 1"):
        assemble(session.forest, Sample(index=0), edit)


def test_nan_is_no_edit() -> None:
    session = Session()
    session.turn([user("a")], "b")
    base = Sample(index=0, reward=float("nan"), metadata={"x": float("nan")})
    assert len(assemble(session.forest, base)) == 1


def test_post_processors_come_after_ownership_and_in_order() -> None:
    session = Session()
    first = session.turn([user("a")], "b")
    for question in "cd":
        session.turn(session.then(first, question), "e")
    seen: list[Any] = []

    def look(leaves: list[Sample], metadata: dict[str, Any]) -> list[Sample]:
        seen.append([(row.reward, int(row.loss_mask.sum())) for row in leaves])
        assert metadata["agent"] == {"reward": 1.0, "rewards": {"r2": 0.0}}
        return leaves[:1]

    rewarded = assemble(
        session.forest,
        Sample(index=0),
        post_processors=[assign_reward, look, leaf_rewards],
        agent={"reward": 1.0, "rewards": {"r2": 0.0}},
    )
    # The leaf committed first owns the turn that both have: b, e and two stop tokens against e and one.
    assert seen == [[(1.0, 2), (1.0, 4)]]
    assert [row.reward for row in rewarded] == [0.0]


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (lambda rows, metadata: rows + rows, "1 rows more than once, and 0 values"),
        (lambda rows, metadata: [1, 2], "0 rows more than once, and 2 values that are no samples"),
    ],
)
def test_a_post_processor_returns_samples_each_once(hook: Any, got: str) -> None:
    session = Session()
    session.turn([user("a")], "b")
    with pytest.raises(HookError, match=got):
        assemble(session.forest, Sample(index=0), keep_all, [hook])


HOOKS = [keep_all, drop_retries, mask_ownership, assign_reward, leaf_rewards]


@pytest.mark.parametrize("hook", [keep_all, drop_retries, mask_ownership, leaf_rewards], ids=lambda hook: hook.__name__)
def test_hooks_name_all_samples_that_they_cannot_read(hook: Any) -> None:
    samples, metadata = rows()
    samples[0].metadata, samples[2].metadata = None, {"leaf": {"node_id": 4}}
    with pytest.raises(HookError, match=r"input of a hook\n +got: +samples 0, 2 without some of it") as raised:
        hook(samples, metadata | {"agent": {"rewards": {}}})
    assert raised.value.rows == (0, 2)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_hooks_without_samples_or_metadata(hook: Any) -> None:
    with pytest.raises(HookError, match=r"got: +samples of type NoneType"):
        hook(None, tree(*SHAPE) | {"agent": {"reward": 1.0}})
    if hook is not keep_all:
        for metadata in (None, {"tree": {"nodes": [{}]}, "agent": [1]}):
            with pytest.raises(HookError):
                hook(rows()[0], metadata)


def test_an_error_of_ownership_leaves_all_masks_as_they_were() -> None:
    metadata = tree(None, 0, 0, 0)
    samples = [leaf(metadata, n) for n in (2, 3, 1)]
    for sample in samples[1:]:
        sample.metadata["leaf"]["path_node_ids"].append(7)
    with pytest.raises(HookError, match="KeyError: 7"):
        mask_ownership(samples, metadata)
    assert [sample.loss_mask for sample in samples] == [[1, 1, 0, 1, 1]] * 3


@pytest.mark.parametrize(
    ("agent", "got"),
    [
        ({"rewards": [1]}, r"rewards of the agent\n +got: +\[1\]"),
        ({"rewards": "r3"}, r"got: +'r3'"),
        ([1], r"session_metadata\['agent'\]\n +got: +\[1\]"),
    ],
)
def test_agents_whose_rewards_are_none(agent: Any, got: str) -> None:
    samples, metadata = rows()
    with pytest.raises(HookError, match=got):
        leaf_rewards(samples, metadata | {"agent": agent})


def test_rows_that_end_before_their_leaf_have_its_reward() -> None:
    """A row cut by its limit, and the earlier row of a path with an aborted turn."""
    session = Session()
    first = session.turn([user("a")], "b", finish_reason="abort")
    session.turn(session.then(first, "c"), "d")
    agent = {"rewards": {"r1": 0.5}}
    found = assemble(session.forest, Sample(index=0), post_processors=[leaf_rewards], agent=agent)
    assert [(row.reward, row.metadata["leaf"]["path_node_ids"]) for row in found] == [(0.5, [1]), (0.5, [0])]
    limit = first.context_length
    found = assemble(session.forest, Sample(index=0), post_processors=[leaf_rewards], agent=agent, max_seq_len=limit)
    assert [(row.reward, row.metadata["leaf"]["path_node_ids"]) for row in found] == [(0.5, [0])]
