"""Normalize prompt groups one by one, as soon as all their rollouts have arrived."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig, StreamConfig
from miles_norm.errors import ConfigError, GroupingError, MilesNormError, format_rows
from miles_norm.grouping import RolloutIndex, recover_groups
from miles_norm.normalize import normalize_columns
from miles_norm.result import NormalizedRewards
from miles_norm.rewards import choose_rollout_rewards

__all__ = ["DroppedGroup", "GroupPart", "NormalizedGroup", "StepReport", "StreamingNormalizer", "batch_stage"]

logger = logging.getLogger("miles_norm")


@dataclass(frozen=True, eq=False)
class GroupPart:
    """The rows of a group that came in one call of ``add``."""

    payload: Any
    """What was given to that call beside the columns."""
    rows: Tensor
    """int64: their numbers among the rows of that call."""
    advantages: Tensor
    """float32: one for each of them."""
    trained: Tensor
    """bool: the row has a trainable token."""


@dataclass(frozen=True, eq=False)
class NormalizedGroup:
    """A prompt group with its advantages."""

    group_id: Hashable
    """As given; with adapters (adapter, id)."""
    complete: bool
    """It has all of its ``n_samples_per_prompt`` rollouts."""
    parts: tuple[GroupPart, ...]
    mean: float
    """Of the rewards of its counted rollouts."""
    std: float


@dataclass(frozen=True)
class DroppedGroup:
    """A group, or late rollouts of one, that got no advantages."""

    group_id: Hashable
    rollout_ids: tuple[Hashable, ...]
    reason: str
    """``incomplete``, ``late``, or the error that its rewards gave."""


@dataclass(frozen=True)
class StepReport:
    """What a step left behind."""

    normalized: int
    """Groups that got advantages."""
    dropped: tuple[DroppedGroup, ...]
    carried: tuple[Hashable, ...]
    """Groups that wait for more rollouts."""


@dataclass(eq=False)
class _OpenGroup:
    """What has arrived of a group so far."""

    pieces: list[tuple[Any, Tensor, RolloutColumns]] = field(default_factory=list)
    """Payload, row numbers and columns of each call."""
    rollouts: list[Hashable] = field(default_factory=list)
    """Ids of the rollouts; a row without an id has one of its own."""


class StreamingNormalizer:
    """Prompt groups in pieces, in any order, in; each group with its advantages out, once it is complete.

    Why: an asynchronous trainer takes groups as they are finished. Statistics are those of one group alone, so a group
    that is complete gets the bits that it has in a batch. The rows of a rollout come in one call, the rollouts of a
    group in any number of them.

    Args:
        config: ``n_samples_per_prompt`` says when a group is complete. Groups are named by ids, never guessed.
        stream: What happens to late rollouts and to groups that stay incomplete; defaults to ``StreamConfig()``.

    Raises:
        ConfigError: no config, or one without ``n_samples_per_prompt``; or settings that need the whole batch, unless
            ``batch_stage`` is ``buffer``: then groups are held back until ``end_step``, and a warning says so.

    >>> stream = StreamingNormalizer(NormalizationConfig(n_samples_per_prompt=2, advantage_estimator="dr_grpo"))
    >>> def one(rollout, reward):
    ...     return RolloutColumns(group=["a"], rollout=[rollout], reward=[reward], trainable_tokens=[5])
    >>> stream.add(one(0, 1.0), "first"), stream.add(one(1, 0.0), "second")
    (0, 1)
    >>> [(part.payload, part.advantages.tolist()) for group in stream.take() for part in group.parts]
    [('first', [0.5]), ('second', [-0.5])]
    """

    def __init__(self, config: NormalizationConfig, stream: StreamConfig | None = None) -> None:
        self.config, self.stream = NormalizationConfig.checked(config), StreamConfig.checked(stream)
        self._size = _group_size(self.config)
        self._holds_back = _needs_the_batch(self.config, self.stream)
        self._named = self.config.model_copy(update={"group_fallback": "error"})
        self._open: dict[Hashable, _OpenGroup] = {}
        self._ready: list[NormalizedGroup] = []
        self._closed: list[set[Hashable]] = [set()]  # of this step, then of those before it
        self._normalized = 0
        self._dropped: list[DroppedGroup] = []

    def add(self, columns: RolloutColumns, payload: Any = None) -> int:
        """Take in whole rollouts, of one group or of several.

        Args:
            columns: Their index columns.
            payload: Handed out again with each group that has some of these rows: where the samples are, for example.

        Returns:
            How many groups ``take`` has to give.

        Raises:
            GroupingError: rows without a group id, a rollout that came before, or, unless ``late_rollouts`` is
                ``drop``, rollouts of a group that is closed. Nothing of the call is taken in.
            MilesNormError: rows whose rewards cannot be used (nothing is taken in), or groups whose rewards together
                cannot be: these are dropped and listed, all others of the call are taken in. Of a group, rows are
                numbered in the order in which they came.
        """
        index = self._read(RolloutColumns.checked(columns))
        arrived = _by_group(columns, index)
        late = [key for key in arrived if any(key in step for step in self._closed)]
        self._check(arrived, late)
        for key in late:
            self._drop(key, arrived.pop(key)[1], "late")
        complete = []
        for key, (rows, rollouts) in arrived.items():
            group = self._open.setdefault(key, _OpenGroup())
            piece = columns.select(rows)
            piece.without_id, piece.odd_masks = (), ()  # said when they were read, by the numbers of this call
            group.pieces.append((payload, rows, piece))
            group.rollouts.extend(rollouts)
            if len(group.rollouts) >= self._size and not self._holds_back:
                complete.append(key)
        self._finish([*complete, *self._left_over(self._surplus(complete))])
        return len(self._ready)

    def take(self) -> list[NormalizedGroup]:
        """The groups that were normalized since the last call, in that order."""
        ready, self._ready = self._ready, []
        return ready

    def end_step(self) -> StepReport:
        """Apply ``incomplete_groups`` to every group that is not complete, and say what became of all groups.

        Groups held back for a batch stage are normalized together here; ``take`` then has them.

        Raises:
            MilesNormError: as ``add``, for groups whose rewards together cannot be used; the step is ended.
        """
        incomplete = [key for key, group in self._open.items() if len(group.rollouts) < self._size]
        complete = [key for key in self._open if key not in set(incomplete)]
        try:
            self._finish([*complete, *self._left_over(incomplete)])
        finally:
            self._closed = [set(), *self._closed][: self.stream.remembered_steps + 1]
        report = StepReport(self._normalized, tuple(self._dropped), tuple(self._open))
        self._normalized, self._dropped = 0, []
        return report

    def _read(self, columns: RolloutColumns) -> RolloutIndex:
        if columns.nested_sizes is not None:
            raise GroupingError(
                "rows of a stream",
                got="nested rows",
                expected="flat rows with a group id each",
                reason="more rollouts of a group may come in another call, which has to name the same group",
                remedy=f"set {self.config.group_key} on every row and pass them flat",
            )
        index, warnings = recover_groups(columns, self._named)
        choose_rollout_rewards(columns, index, self.config)  # raises what is wrong with single rows and rollouts
        for text in (*columns.notes, *warnings):
            logger.warning(text)
        return index

    def _check(self, arrived: dict[Hashable, tuple[Tensor, list[Hashable]]], late: Sequence[Hashable]) -> None:
        repeated = {
            key: again
            for key, (_, rollouts) in arrived.items()
            if key in self._open and (again := sorted(set(self._open[key].rollouts) & set(rollouts), key=str))
        }
        if repeated:
            ids = [rollout for again in repeated.values() for rollout in again]
            raise GroupingError(
                f"{format_rows(ids, 'rollout')} of {format_rows(list(repeated), 'prompt group')}",
                got="rows of a rollout that came in an earlier call",
                expected="all rows of a rollout in one call, and each rollout once",
                reason="who speaks for a rollout is decided among all of its rows",
                remedy="collect the rows of a rollout first; if a call was repeated, it had been taken in",
                rows=sorted(row for key in repeated for row in arrived[key][0].tolist()),
            )
        if late and self.stream.late_rollouts == "error":
            raise GroupingError(
                f"late rollouts of {format_rows(late, 'prompt group')}",
                got=", ".join(format_rows(arrived[key][1], "rollout", 5) for key in late[:5]),
                expected="no more rollouts of a group that was handed out or dropped (late_rollouts is 'error')",
                reason="its siblings may be trained already, and their advantages would change",
                remedy="set late_rollouts to 'drop', or n_samples_per_prompt to the true size of a group",
                rows=sorted(row for key in late for row in arrived[key][0].tolist()),
            )

    def _surplus(self, complete: Sequence[Hashable]) -> list[Hashable]:
        """The oldest of the groups that stay open, as far as there are more than may be."""
        most = self.stream.max_open_groups
        if most is None or len(self._open) - len(complete) <= most:
            return []
        waiting = [key for key in self._open if key not in complete]
        return waiting[: len(waiting) - most]

    def _left_over(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Those of incomplete groups that are to be normalized; others are dropped or stay open."""
        match self.stream.incomplete_groups:
            case "normalize":
                return list(keys)
            case "drop":
                for key in keys:
                    self._drop(key, self._open.pop(key).rollouts, "incomplete")
        return []

    def _drop(self, key: Hashable, rollouts: Sequence[Hashable], reason: str) -> None:
        self._closed[0].add(key)
        shown = tuple(None if isinstance(rollout, _Nameless) else rollout for rollout in rollouts)
        self._dropped.append(DroppedGroup(key, shown, reason))

    def _finish(self, keys: Sequence[Hashable]) -> None:
        """Normalize these groups: together, and one by one where that fails, so that a bad one spoils no other."""
        if not keys:
            return
        groups = {key: self._open.pop(key) for key in keys}
        try:
            self._hand_out(groups)
            return
        except MilesNormError as error:
            if self._holds_back or len(groups) == 1:
                for key, group in groups.items():
                    self._drop(key, group.rollouts, str(error))
                raise
        errors = []
        for key, group in groups.items():
            try:
                self._hand_out({key: group})
            except MilesNormError as error:
                self._drop(key, group.rollouts, str(error))
                errors.append(error)
        if errors:
            raise errors[0]

    def _hand_out(self, groups: dict[Hashable, _OpenGroup]) -> None:
        whole = RolloutColumns.concat([columns for group in groups.values() for _, _, columns in group.pieces])
        result = normalize_columns(whole, self._named)
        start = 0
        for key, group in groups.items():
            parts = []
            number = int(result.index.row_group[start])
            for payload, rows, _ in group.pieces:
                taken = slice(start, start + len(rows))
                parts.append(GroupPart(payload, rows, result.advantages[taken], result.trained_rows[taken]))
                start += len(rows)
            self._ready.append(_normalized(key, len(group.rollouts) >= self._size, parts, result, number))
            self._closed[0].add(key)
        self._normalized += len(groups)


class _Nameless:
    """Stands for the id of a rollout that has none; it equals no other."""


def _normalized(
    key: Hashable, complete: bool, parts: Sequence[GroupPart], result: NormalizedRewards, number: int
) -> NormalizedGroup:
    statistics = result.statistics
    return NormalizedGroup(key, complete, tuple(parts), float(statistics.mean[number]), float(statistics.std[number]))


def _by_group(columns: RolloutColumns, index: RolloutIndex) -> dict[Hashable, tuple[Tensor, list[Hashable]]]:
    """Rows of each group, by its id, and the ids of its rollouts, padding aside."""
    real = torch.ones(len(columns), dtype=torch.bool) if columns.padding is None else ~columns.padding.cpu()
    named = set(index.row_rollout.cpu()[real].tolist())
    ids: list[list[Hashable]] = [[] for _ in range(index.num_groups)]
    for rollout, (group, label) in enumerate(zip(index.rollout_group.tolist(), index.rollout_ids, strict=True)):
        if rollout in named:
            ids[group].append(_Nameless() if label is None else label)
    return {
        key: (torch.tensor(rows), rollouts)
        for key, rows, rollouts in zip(index.group_ids, index.groups, ids, strict=True)
    }


def _group_size(config: NormalizationConfig) -> int:
    if config.n_samples_per_prompt is None:
        raise ConfigError(
            "NormalizationConfig of a stream",
            got="no n_samples_per_prompt",
            expected="the number of rollouts of a prompt group",
            reason="a group is normalized once all of them have arrived",
            remedy="set n_samples_per_prompt",
        )
    return config.n_samples_per_prompt


def batch_stage(config: NormalizationConfig) -> str | None:
    """The setting, in words, that divides by a deviation over the batch; None if there is none.

    >>> batch_stage(NormalizationConfig()), batch_stage(NormalizationConfig(options={"whitening": "rollout"}))
    (None, "options.whitening='rollout'")
    """
    if config.options.whitening != "none":
        return f"options.whitening={config.options.whitening!r}"
    gdpo = config.advantage_estimator == "gdpo" and config.normalizes_groups
    return "advantage_estimator='gdpo'" if gdpo else None


def _needs_the_batch(config: NormalizationConfig, stream: StreamConfig) -> bool:
    """Whether groups are held back until the end of a step."""
    setting = batch_stage(config)
    if setting is None:
        return False
    if stream.batch_stage == "buffer":
        logger.warning("%s divides by a deviation over the batch: groups are held back until end_step", setting)
        return True
    raise ConfigError(
        "NormalizationConfig of a stream",
        got=setting,
        expected="settings that need no more than one prompt group",
        reason="it divides by a deviation over the batch, which is not known before the last group has arrived",
        remedy="set batch_stage to 'buffer', which holds all groups back until end_step, or choose other settings",
    )
