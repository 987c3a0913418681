"""Rewards whose rows are on several ranks of ``torch.distributed``: the same bits as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.errors import ConfigError, MilesNormError, SampleError
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards

__all__ = ["DistributedRewards", "normalize_distributed"]


@dataclass(frozen=True, eq=False)
class DistributedRewards:
    """The result of all ranks, and which of its rows are this rank's."""

    result: NormalizedRewards
    """Of the rows of all ranks, rank after rank; the same on every rank, so that what is computed from it is, too:
    loss weights, update plans, metrics."""
    rows: slice
    """This rank's rows of ``result``, in the order in which it gave them."""

    @property
    def advantages(self) -> Tensor:
        """float32: of this rank's rows."""
        return self.result.advantages[self.rows]


def normalize_distributed(
    columns: RolloutColumns | None,
    config: NormalizationConfig | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> DistributedRewards:
    """``normalize_columns`` over the rows of all ranks; rows of a prompt group, and of a rollout, may be on several.

    Every rank gets the index columns of every other, at most 64 bytes a row (see ``RolloutColumns``), and normalizes
    the whole; tokens stay where they are. Why not each group on one rank: what follows needs all of them as well, from
    whitening to the denominators of the loss, and a million rows take less time to normalize than to wait for.

    Every rank of the group must call it. An error in the rows is raised on every rank, with row numbers of the whole,
    so that none waits for one that has given up.

    Args:
        columns: This rank's rows; None if it has none. Groups are named by ids, which mean the same on all ranks.
        config: Defaults to ``NormalizationConfig()``; the same on every rank.
        process_group: Defaults to all processes.

    Returns:
        On the device of ``config``, else of ``columns``, else the CPU.

    Raises:
        ConfigError: ranks with different settings or without a config, or a rank that is not in the group.
        SampleError: no rank has a row, or one has something else than columns.
        MilesNormError: as ``normalize_columns``, on every rank.
    """
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ConfigError(
            "process_group",
            got="a group that this process is not in",
            expected="a group with this process",
            reason="only its members exchange rows",
            remedy="call normalize_distributed on the members of the group",
        )
    mine: tuple[RolloutColumns | None, dict[str, Any]] | MilesNormError
    try:
        config = NormalizationConfig.checked(config)
        mine = None if columns is None else RolloutColumns.checked(columns), config.model_dump(exclude={"device"})
    except MilesNormError as error:
        mine = error
    given: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(given, mine, group=process_group)
    for number, one in enumerate(given):
        if isinstance(one, MilesNormError):
            raise one.within(f"rank {number}")
    _check_settings([settings for _, settings in given])
    parts = [part for part, _ in given if part is not None]
    if not parts:
        raise SampleError(
            "columns",
            got=f"no rows on any of {len(given)} ranks",
            expected="rows on at least one of them",
            reason="there is nothing to normalize",
            remedy="check that the rollouts arrived, or skip the step",
        )
    assert config is not None  # checked on every rank
    whole = RolloutColumns.concat(parts)
    if columns is not None:
        whole = whole.to(columns.reward.device)
    sizes = [0 if part is None else len(part) for part, _ in given]
    start = sum(sizes[:rank])
    return DistributedRewards(normalize_columns(whole, config), slice(start, start + sizes[rank]))


def _check_settings(settings: list[dict[str, Any]]) -> None:
    differing = {name: [each[name] for each in settings] for name in settings[0]}
    differing = {name: values for name, values in differing.items() if any(value != values[0] for value in values)}
    if differing:
        raise ConfigError(
            f"{' and '.join(differing)} of {len(settings)} ranks",
            got="; ".join(
                ", ".join(f"rank {rank}: {name}={value}" for rank, value in enumerate(values[:10]))
                for name, values in differing.items()
            ),
            expected="the same settings on every rank",
            reason="ranks would disagree about advantages and weights",
            remedy="read the settings once and hand them to every rank",
        )
