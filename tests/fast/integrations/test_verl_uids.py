"""The uids that carry rollouts through verl; verl itself is not needed."""

from typing import Any

import numpy as np
import pytest
import torch

from miles_norm.errors import SampleError
from miles_norm.integrations.verl_uids import RolloutUid, rollout_uids, uids_of_rows

IDENTITY = [torch.ones(2), torch.ones(2)]


def rollouts(uids: Any, rows: int = 2, n: int | None = None) -> Any:
    return uids_of_rows(uids, rows).rollouts(n)


def test_rollouts_are_compared_by_value() -> None:
    uids = np.array(
        [RolloutUid("p", torch.tensor(3)), RolloutUid("p", 3.0), RolloutUid("q", np.int64(3))], dtype=object
    )
    assert rollouts(uids, 3) == [("p", 3), ("p", 3), ("q", 3)]
    assert rollouts(rollout_uids(["p", "p"], [torch.tensor([1]), None])) == [("p", 1), None]
    assert rollouts(rollout_uids((uid for uid in "pp"), range(2))) == [("p", 0), ("p", 1)]


@pytest.mark.parametrize("bad", [True, [1], {"a": 1}, torch.ones(2), (torch.ones(2),)])
def test_rollouts_that_are_no_ids(bad: Any) -> None:
    with pytest.raises(SampleError, match="rollout id of row 1") as error:
        rollout_uids(["p", "p"], [0, bad])
    assert error.value.rows == (1,)
    with pytest.raises(SampleError, match="rollout id of row 1"):
        rollouts([RolloutUid("p", 0), RolloutUid("p", bad)])


@pytest.mark.parametrize(
    ("prompts", "ids", "match"),
    [
        (["p"], [0, 1], "prompts and rollouts\n  got:      1 prompts, 2 rollouts"),
        (["p", 1, None], [0, 0, 0], "prompts of rows 1, 2\n"),
        ("pp", [0, 1], "prompts\n  got:      a value of type str"),
        (["p"], 7, "rollouts\n  got:      a value of type int"),
        (["p"], torch.tensor(7), "rollouts\n  got:      a value of type Tensor"),
    ],
)
def test_columns_that_do_not_fit(prompts: Any, ids: Any, match: str) -> None:
    with pytest.raises(SampleError, match=match):
        rollout_uids(prompts, ids)


@pytest.mark.parametrize("uids", [None, "pp", 7, ["p"], [["p"], ["p"]], IDENTITY, torch.ones(2, 2)])
def test_uids_that_are_none(uids: Any) -> None:
    with pytest.raises(SampleError, match="uid"):
        rollouts(uids)


def test_plain_uids_in_tensors_are_counted_by_value() -> None:
    """Two rows of one prompt where it has one rollout: their tensors hash by identity."""
    with pytest.raises(SampleError, match=r"uid of rows 0, 1(.*\n)*.*rollout\.n=1") as error:
        rollouts([torch.tensor(5), torch.tensor(5)], n=1)
    assert error.value.rows == (0, 1)
    assert rollouts([torch.tensor(5), torch.tensor(6)], n=1) is None
