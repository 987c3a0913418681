"""The session hooks on Miles' own samples, as its session server calls them: leaves and metadata in, rows out."""

import inspect
from typing import Any

import pytest
from trainer_samples import MilesSample

from miles_norm.session import hooks

# A first turn of two tokens after a prompt of two, a tool's answer of two, and two second turns.
SPANS = {0: [2, 4], 1: [6, 7], 2: [6, 8]}
METADATA = {
    "tree": {
        "nodes": [
            {"id": n, "parent": None if n == 0 else 0, "completion_span": span, "response_id": f"response-{n}"}
            for n, span in SPANS.items()
        ]
    },
    "agent": {"reward": 0.25, "rewards": {"response-1": 0.5, "response-2": 1.0}},
}


def leaves() -> list[Any]:
    return [
        MilesSample(
            tokens=list(range(SPANS[leaf][1])),
            response_length=SPANS[leaf][1] - 2,
            loss_mask=[1, 1, 0, 0] + [1] * (SPANS[leaf][1] - 6),
            metadata={
                "leaf": {"node_id": leaf, "parent": 0, "path_node_ids": [0, leaf], "response_id": f"response-{leaf}"}
            },
        )
        for leaf in (1, 2)
    ]


@pytest.mark.parametrize("name", ["keep_all", "drop_retries", "mask_ownership", "assign_reward", "leaf_rewards"])
def test_signature(name: str) -> None:
    hook = getattr(hooks, name)
    assert list(inspect.signature(hook).parameters) == ["leaf_samples", "session_metadata"]
    assert not inspect.iscoroutinefunction(hook)


def test_pickers() -> None:
    given = leaves()
    assert [sample is given[1] for sample in hooks.drop_retries(given, METADATA)] == [True]
    assert hooks.keep_all(given, METADATA) == given[::-1]


def test_the_post_processor_of_the_page() -> None:
    """A shared turn is trained in the row of the leaf that was committed first, and each leaf has its own reward."""
    first, second = hooks.leaf_rewards(hooks.mask_ownership(leaves(), METADATA), METADATA)
    assert (first.loss_mask, first.reward) == ([1, 1, 0, 0, 1], 0.5)
    assert (second.loss_mask, second.reward) == ([0, 0, 0, 0, 1, 1], 1.0)
    assert [sample.reward for sample in hooks.assign_reward(leaves(), METADATA)] == [0.25, 0.25]
