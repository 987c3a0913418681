"""Rewards of samples that are objects of a Ray cluster: index columns come together, everything else stays."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_norm.cluster.losses import fetched
from miles_norm.cluster.package import ray_package, remote
from miles_norm.cluster.tasks import convert_part, cut_part, join_shard, read_part, sent_columns
from miles_norm.columns.ids import entries_of
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.conversion import result_columns
from miles_norm.errors import SampleError, format_rows
from miles_norm.loss import UpdatePlan
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards
from miles_norm.sharding import Shard, ShardPlan, plan_shards
from miles_norm.sharding.schedule import Balance, KeepTogether
from miles_norm.sharding.shards import rows_are_free

__all__ = ["ClusterRewards", "get_shard", "normalize_on_cluster"]


def normalize_on_cluster(
    parts: Sequence[Any],
    config: NormalizationConfig | None = None,
    prompt_group_sizes: Sequence[int] | None = None,
) -> ClusterRewards:
    """``normalize_rewards`` for samples that are spread over a Ray cluster, with the same bits.

    Each part is turned into index columns on the node that holds it; these, at most 64 bytes a row, come to the caller
    and are normalized there. Tokens stay where they are. A task whose worker dies is run again, and gives the same
    bits; samples whose node is lost are made again by Ray where it can.

    Args:
        parts: Object refs of lists of samples, in the order of the rows. Rows of a prompt group, and of a rollout, may
            be in several; a part may have none. They may still be computed.
        config: Defaults to ``NormalizationConfig()``.
        prompt_group_sizes: Rows of each prompt group over all parts.

    Raises:
        SampleError: no object refs, one of them twice, or no rows in any part.
        LostRowsError: samples that are gone; all parts are named.
        MilesNormError: as ``normalize_rewards``. What is wrong with the rows of one part names the part and its own
            row numbers, everything else the row numbers of the whole.
    """
    config, refs = NormalizationConfig.checked(config), _checked_parts(parts)
    reading: dict[Any, Any] = {}
    waiting = refs
    while waiting:
        # Where a part is can be told once it is there; the tokens are not fetched.
        done, waiting = ray_package().wait(waiting, num_returns=1, fetch_local=False)
        reading |= {ref: remote(read_part).options(**_near(ref)).remote(ref, config) for ref in done}
    payloads = fetched([reading[ref] for ref in refs], "part")
    found = [pickle.loads(payload) for payload in payloads]
    full = [number for number, part in enumerate(found) if part is not None]
    if not full:
        raise _bad_parts(f"no rows in {len(refs)} parts", "rows in at least one part")
    read = [found[number] for number in full]
    columns = RolloutColumns.concat([columns for columns, _ in read])
    ends = np.cumsum([0, *(len(columns) for columns, _ in read)]).tolist()
    known = all(lengths is not None for _, lengths in read)
    return ClusterRewards(
        result=normalize_columns(columns, config, prompt_group_sizes),
        parts=tuple(refs[number] for number in full),
        rows=tuple(slice(start, stop) for start, stop in pairwise(ends)),
        lengths=torch.from_numpy(np.concatenate([lengths for _, lengths in read]).astype(np.int64)) if known else None,
        index_bytes=sum(map(len, payloads)),
    )


def get_shard(ref: Any) -> Shard:
    """The shard behind a ref of ``ClusterRewards.shards``: views of the object store's memory, not to be written to.

    Raises:
        LostRowsError: it is gone and cannot be made again.
        MilesNormError: what its samples lack to become train data.
    """
    shard: Shard = fetched([ref], "shard")[0]
    return shard


@dataclass(eq=False)
class ClusterRewards:
    """What ``normalize_on_cluster`` found, and where the samples are."""

    result: NormalizedRewards
    """Of all rows, part after part."""
    parts: tuple[Any, ...]
    """Object refs of the samples, without those of parts that have no rows."""
    rows: tuple[slice, ...]
    """The rows of each part in ``result``."""
    lengths: Tensor | None
    """int64 ``[N]``: tokens of each row; None where rows have none."""
    index_bytes: int
    """Bytes that came to the caller."""
    returned_bytes: int = field(default=0, init=False)
    """Bytes of advantages, weights and what else goes back to the rows."""

    def train_data(
        self,
        metadata: Mapping[str, Any] | None = None,
        loss_config: LossConfig | None = None,
        plan: UpdatePlan | None = None,
    ) -> list[Any]:
        """Object refs of the train data of each part, made and kept on the node that holds it.

        Args:
            metadata: Of the rollout step, as ``convert_samples_to_train_data`` takes it.
            loss_config: For the column ``weights``.
            plan: Of ``plan_updates``, which the weights then count.
        """
        found = self._sent(loss_config, plan)
        return [
            remote(convert_part).options(**_near(ref)).remote(ref, columns, dict(metadata or {}))
            for ref, columns in zip(self.parts, found, strict=True)
        ]

    def plan_shards(
        self,
        data_parallel_size: int,
        plan: UpdatePlan | None = None,
        *,
        balance: Balance = "tokens",
        keep_together: KeepTogether = "rollouts",
    ) -> ShardPlan:
        """Which rank trains which row; see ``miles_norm.plan_shards``. No token is looked at.

        Raises:
            SampleError: rows without tokens, and as there.
            ConfigError: as ``split_by_data_parallel``.
        """
        if self.lengths is None:
            raise _bad_parts("rows without tokens", "tokens on every row")
        index = self.result.index if plan is None else plan.result.index
        rollout = None if rows_are_free(keep_together) else index.row_rollout
        return plan_shards(self.lengths, data_parallel_size, plan, rollout=rollout, balance=balance)

    def shards(
        self,
        plan: ShardPlan,
        metadata: Mapping[str, Any] | None = None,
        loss_config: LossConfig | None = None,
        nodes: Sequence[str] | None = None,
    ) -> list[Any]:
        """Object refs of one ``Shard`` per rank; a trainer reads its own with ``get_shard``.

        Every part is cut where it is, and each piece goes to the node of its rank alone; none comes to the caller.

        Args:
            plan: Of ``plan_shards``.
            metadata: Of the rollout step.
            loss_config: For the column ``weights``, which counts the updates that ``plan`` schedules.
            nodes: Ids of the ranks' nodes; by default Ray chooses where a shard is put together.
        """
        ranks = plan.data_parallel_size
        if nodes is not None and len(nodes) != ranks:
            raise _bad_parts(f"{len(nodes)} nodes for {ranks} ranks", "the id of a node for each rank")
        found = self._sent(loss_config, plan.plan)
        of_row = plan.row_rank.to(torch.int32).numpy()
        pieces = []
        for ref, rows, columns in zip(self.parts, self.rows, found, strict=True):
            options = _near(ref) | {"num_returns": ranks}
            cut = (
                remote(cut_part)
                .options(**options)
                .remote(ref, columns, dict(metadata or {}), of_row[rows].tobytes(), ranks)
            )
            pieces.append(cut if ranks > 1 else [cut])
        return [
            remote(join_shard)
            .options(**({} if nodes is None else _on(nodes[rank])))
            .remote(
                rank,
                plan.rows_of_rank(rank).numpy().tobytes(),
                plan.ends_of_rank(rank),
                *(of_part[rank] for of_part in pieces),
            )
            for rank in range(ranks)
        ]

    def _sent(self, loss_config: LossConfig | None, plan: UpdatePlan | None) -> list[bytes]:
        """What goes back to each part."""
        columns = result_columns(self.result if plan is None else plan.result, loss_config, plan)
        sent = [sent_columns(columns, rows) for rows in self.rows]
        self.returned_bytes += sum(map(len, sent))
        return sent


def _checked_parts(parts: Sequence[Any]) -> list[Any]:
    refs = entries_of(parts)
    kind = ray_package().ObjectRef
    if refs is None:
        raise _bad_parts(f"a value of type {type(parts).__name__}", "a list of object refs, each of a list of samples")
    others = [number for number, ref in enumerate(refs) if not isinstance(ref, kind)]
    if others:
        named = f"{format_rows(others, 'part')} of type {type(refs[others[0]]).__name__}"
        raise _bad_parts(named, "object refs, as ray.put or a task returns them")
    if not refs or len(set(refs)) < len(refs):
        raise _bad_parts("no parts" if not refs else f"{len(refs) - len(set(refs))} refs that are there twice")
    return refs


def _near(ref: Any) -> dict[str, Any]:
    """Options of a task that runs where an object is; anywhere, if it is small enough to travel or its node is gone."""
    places = ray_package().experimental.get_object_locations([ref]).get(ref, {}).get("node_ids") or []
    return _on(min(places)) if places else {}


def _on(node: str) -> dict[str, Any]:
    strategies = ray_package().util.scheduling_strategies
    return {"scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node, soft=True)}


def _bad_parts(got: str, expected: str = "one object ref per list of samples") -> SampleError:
    return SampleError(
        "parts on a cluster",
        got=got,
        expected=expected,
        reason="rows are numbered part after part, and balanced by their tokens",
        remedy="pass the refs of the lists of samples, each once",
    )
