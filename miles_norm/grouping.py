"""Recover prompt groups and rollouts: rows -> ``RolloutIndex``, and how it was done."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from miles_norm.columns.ids import IdColumn, PairedIds, is_readable, plain_id, unreadable
from miles_norm.columns.rollout_columns import RolloutColumns
from miles_norm.config import NormalizationConfig
from miles_norm.errors import GroupingError, format_rows, shown
from miles_norm.runs import number_rows

__all__ = ["RolloutIndex", "mixed_groups", "recover_groups"]


@dataclass(frozen=True, eq=False)
class RolloutIndex:
    """Which rollout a row belongs to, and which prompt group a rollout.

    Rollouts and groups are numbered by their first row; groups from ``prompt_group_sizes`` or nesting by position,
    so that an empty group keeps its number.
    """

    row_rollout: Tensor
    """int64 ``[N]``."""
    rollout_group: Tensor
    """int64 ``[R]``."""
    first_row: Tensor
    """int64 ``[R]``: the first row of each rollout."""
    num_groups: int
    """G, empty groups included."""
    group_source: str
    """What formed the groups: ``prompt_group_sizes``, ``nesting``, the group key, or a guess: ``fixed_fan_out``,
    ``single_group``."""
    rollouts_by_group: Tensor | None
    """int64 ``[R]``: rollouts, group after group; None where their own order is that already."""
    group_column: IdColumn | None
    rollout_column: IdColumn | None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.row_rollout.shape[0]

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.rollout_group.shape[0]

    @cached_property
    def row_group(self) -> Tensor:
        """int64 ``[N]``: the prompt group of each row."""
        return self.rollout_group[self.row_rollout]

    @cached_property
    def group_first_row(self) -> Tensor:
        """int64 ``[G]``: the first row of each group, N for an empty one."""
        first = self.rollout_group.new_full((self.num_groups,), self.num_rows)
        return first.scatter_reduce_(0, self.rollout_group, self.first_row, "amin")

    @cached_property
    def rollout_ids(self) -> list[Hashable]:
        """The id of each rollout as it was given; None for a row without one, which is a rollout of its own."""
        return _labels(self.rollout_column, self.first_row)

    @cached_property
    def group_ids(self) -> list[Hashable]:
        """The id of each prompt group: as given by the group key, (adapter, id) with adapters, else its position."""
        if self.group_column is None:
            return list(range(self.num_groups))
        rows, missing = self.group_first_row, self.group_column.missing
        if missing is not None:
            # Padding that joined a group may stand before the rows that name it.
            named = torch.nonzero(~missing)[:, 0]
            first = torch.full_like(rows, self.num_rows).scatter_reduce_(0, self.row_group[named], named, "amin")
            rows = torch.where(first < self.num_rows, first, rows)
        return _labels(self.group_column, rows)

    def rows_of_rollout(self, rollout: int) -> list[int]:
        """Rows of one rollout, ascending."""
        return _part(*self._rows_by_rollout, rollout)

    def rollouts_of_group(self, group: int) -> list[int]:
        """Rollouts of one prompt group, ascending."""
        return _part(*self._rollouts_by_group, group)

    @cached_property
    def _rows_by_rollout(self) -> tuple[Tensor, list[int]]:
        return _sorted_parts(self.row_rollout, self.num_rollouts)

    @cached_property
    def _rollouts_by_group(self) -> tuple[Tensor, list[int]]:
        return _sorted_parts(self.rollout_group, self.num_groups)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Rows of each prompt group, ascending."""
        rows = torch.sort(self.row_group, stable=True).indices
        sizes = torch.bincount(self.row_group, minlength=self.num_groups)
        return [part.tolist() for part in rows.split(sizes.tolist())]


def _sorted_parts(part: Tensor, parts: int) -> tuple[Tensor, list[int]]:
    """Positions, part after part and ascending within each, and where each part begins, with an end: sorted once."""
    starts = torch.cumsum(torch.bincount(part, minlength=parts), 0)
    return torch.sort(part, stable=True).indices, [0, *starts.tolist()]


def _part(positions: Tensor, starts: list[int], number: int) -> list[int]:
    found: list[int] = positions[starts[number] : starts[number + 1]].tolist()
    return found


def _labels(column: IdColumn | None, rows: Tensor) -> list[Hashable]:
    return [None] * len(rows) if column is None else column.labels_at(rows)


def recover_groups(
    columns: RolloutColumns, config: NormalizationConfig, prompt_group_sizes: Sequence[int] | Tensor | None = None
) -> tuple[RolloutIndex, list[str]]:
    """Find the prompt group and the rollout of every row, by the first rule that applies.

    1. ``prompt_group_sizes``: recorded before flattening, so the strongest evidence. Zeros are empty groups.
    2. nesting of the input.
    3. the group key on every row; with adapters the pair (adapter, key). Rows need not be contiguous.
    4. fixed fan-out: N equals ``n_samples_per_prompt * rollout_batch_size``, contiguous.
    5. one group.

    Rules 4 and 5 are guesses: they give a warning, or an error under ``group_fallback="error"``. Padding rows need no
    group key and are not counted for rule 4. The key of a rollout is (group, rollout id).

    Returns:
        The index, and warnings.

    Raises:
        GroupingError: sizes that are no counts or do not sum to N; no evidence under ``group_fallback="error"``.

    >>> columns = RolloutColumns(group=[7, 3, 7], rollout=[0, 1, 2], reward=[1, 2, 3], trainable_tokens=[1, 1, 1])
    >>> index, warnings = recover_groups(columns, NormalizationConfig())
    >>> index.groups, index.group_ids, index.group_source
    ([[0, 2], [1]], [7, 3], 'group_index')
    """
    source, sizes, column, warnings = _choose_rule(columns, config, prompt_group_sizes)
    device, rows = columns.reward.device, len(columns)
    if sizes is not None:
        counts = torch.tensor(sizes, device=device)
        codes = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=rows)
    elif column is not None:
        codes = column.codes
    else:
        codes = _guessed_codes(columns, config.n_samples_per_prompt if source == "fixed_fan_out" else None)
    rollout = columns.rollout
    if sizes is None and columns.padding is not None and rollout is not None:
        codes = _padding_to_its_rollout(codes, column, columns)
    group_count = None if sizes is None else len(sizes)
    numbered = number_rows(codes, None if rollout is None else rollout.codes, group_count)
    index = RolloutIndex(
        row_rollout=numbered.row_run,
        rollout_group=numbered.run_group,
        first_row=numbered.first_row,
        num_groups=numbered.num_groups,
        group_source=source,
        rollouts_by_group=numbered.by_group,
        group_column=column,
        rollout_column=rollout,
    )
    warnings += _contradictions(index, columns, config, sizes)
    return index, warnings


def _choose_rule(
    columns: RolloutColumns, config: NormalizationConfig, given: Sequence[int] | Tensor | None
) -> tuple[str, list[int] | None, IdColumn | None, list[str]]:
    if given is not None:
        return "prompt_group_sizes", _check_sizes(given, len(columns)), None, []
    if columns.nested_sizes is not None:
        return "nesting", list(columns.nested_sizes), None, []
    column, lacking = columns.group, []
    if column is not None:
        lacking = _rows_without_group(column, columns.padding)
        if not lacking:
            return config.group_key, None, _with_adapter(_one_code_for_missing(column), columns.adapter), []
    rows = len(columns) if columns.padding is None else int((~columns.padding).sum())
    n, batch = config.n_samples_per_prompt, config.rollout_batch_size
    fixed = n is not None and batch is not None and rows == n * batch
    found = (
        f"{config.group_key!r} is missing on {format_rows(lacking)}" if lacking else f"no row has {config.group_key!r}"
    )
    remedy = f"set {config.group_key} on every row when it is sampled, or pass prompt_group_sizes"
    if config.group_key != "group_index":
        remedy = f"check group_key={config.group_key!r}: it names a field of the rows or of their metadata; or {remedy}"
    if config.group_fallback == "error":
        product = f"n_samples_per_prompt * rollout_batch_size is {n} * {batch} = {n * batch}" if n and batch else (
            "n_samples_per_prompt and rollout_batch_size are not both set"
        )  # fmt: skip
        raise GroupingError(
            "prompt groups",
            got=f"{rows} rows; {found}; {product}",
            expected="prompt_group_sizes, nested input, or a group id on every row (group_fallback is 'error')",
            reason="a guessed group mixes prompts, and every baseline in it is wrong",
            remedy=remedy,
            rows=lacking,
        )
    if fixed:
        text = f"prompt groups were guessed: {found}, and {rows} rows are {batch} groups of {n} contiguous rows"
        return "fixed_fan_out", None, None, [f"{text}; {remedy}"]
    text = f"prompt groups were guessed: {found}, so all {rows} rows form one group and share one baseline"
    return "single_group", None, None, [f"{text}; {remedy}"]


def _check_sizes(given: Sequence[int] | Tensor, rows: int) -> list[int]:
    odd = unreadable(given) if isinstance(given, Tensor) and not is_readable(given) else None
    sizes = odd or (given.tolist() if hasattr(given, "tolist") else given)
    if not isinstance(sizes, Iterable) or isinstance(sizes, str | bytes | Mapping):
        sizes = [sizes, "no list"]
    sizes = [plain_id(size) if type(size) is not float else size for size in sizes]
    bad = [i for i, size in enumerate(sizes) if isinstance(size, bool) or not isinstance(size, int) or size < 0]
    if bad or sum(sizes) != rows:
        wrong = ", ".join(f"{shown(sizes[i])} at position {i}" for i in bad[:10])
        raise GroupingError(
            "prompt_group_sizes",
            got=wrong or f"{len(sizes)} sizes that sum to {sum(sizes)}",
            expected="non-negative counts" if bad else f"a sum of {rows}, the number of rows",
            reason="each row belongs to exactly one prompt group",
            remedy="pass the number of rows of each prompt group, in the order of the rows, 0 for an empty one",
        )
    return sizes


def _rows_without_group(column: IdColumn, padding: Tensor | None) -> list[int]:
    if column.missing is None:
        return []
    lacking = column.missing if padding is None else column.missing & ~padding
    rows: list[int] = torch.nonzero(lacking)[:, 0].tolist()
    return rows


def _padding_to_its_rollout(codes: Tensor, column: IdColumn | None, columns: RolloutColumns) -> Tensor:
    """Padding rows whose group was not given join the rollout of their id, where one group alone has it."""
    padding, rollout = columns.padding, columns.rollout
    if padding is None or rollout is None or (column is not None and column.missing is None):
        return codes
    lost = padding if column is None or column.missing is None else padding & column.missing
    lost = torch.nonzero(lost)[:, 0]
    real = torch.nonzero(~padding)[:, 0]
    if not len(lost) or not len(real):
        return codes
    real = real[torch.sort(codes[real], stable=True).indices]
    real = real[torch.sort(rollout.codes[real], stable=True).indices]
    ids, wanted = rollout.codes[real], rollout.codes[lost]
    first = torch.searchsorted(ids, wanted).clamp_(max=len(ids) - 1)
    last = (torch.searchsorted(ids, wanted, right=True) - 1).clamp_(min=0)
    groups = codes[real]
    found = (ids[first] == wanted) & (groups[first] == groups[last])
    return codes.index_put((lost[found],), groups[first[found]])


def _one_code_for_missing(column: IdColumn) -> IdColumn:
    """Rows without an id belong together instead of each to itself."""
    if column.missing is None:
        return column
    fresh = int(column.codes[column.missing].min())
    return IdColumn(column.codes.masked_fill(column.missing, fresh), column.labels, column.missing)


def _with_adapter(column: IdColumn, adapter: IdColumn | None) -> IdColumn:
    """Group ids that are unique across adapters: pairs of codes, numbered."""
    if adapter is None:
        return column
    adapter = _one_code_for_missing(adapter)  # the base model, beside adapters
    return PairedIds(adapter, column)


def _guessed_codes(columns: RolloutColumns, size: int | None) -> Tensor:
    """Contiguous groups of ``size`` rows, or one group; padding rows go with the last row before them."""
    device = columns.reward.device
    if size is None:
        return torch.zeros(len(columns), dtype=torch.int64, device=device)
    if columns.padding is None:
        position = torch.arange(len(columns), device=device)
    else:
        position = (torch.cumsum(~columns.padding, 0) - 1).clamp_(min=0)
    return torch.div(position, size, rounding_mode="floor")


def _contradictions(
    index: RolloutIndex, columns: RolloutColumns, config: NormalizationConfig, sizes: list[int] | None
) -> list[str]:
    warnings = []
    guessed = index.group_source in ("fixed_fan_out", "single_group")
    # Padding enters nothing, so it contradicts nothing either.
    real = slice(None) if columns.padding is None else torch.unique(index.row_rollout[~columns.padding])
    reused = _ids_in_several_groups(index, index.first_row if columns.padding is None else index.first_row[real])
    if reused:
        text = f"an id in several prompt groups counts as different rollouts: {reused}"
        warnings.append(f"the guessed groups contradict the rollout ids: {text}" if guessed else text)
    n = config.n_samples_per_prompt
    if guessed and n is not None:
        per_group = torch.bincount(index.rollout_group[real], minlength=index.num_groups)
        wrong = per_group != n if index.group_source == "fixed_fan_out" else per_group > n
        if bool(wrong.any()):
            warnings.append(
                f"the guessed groups contradict the rollout ids: {int(wrong.sum())} of {index.num_groups} groups hold "
                f"another number of rollouts than n_samples_per_prompt={n}, so rows of one rollout or of several "
                f"prompts were mixed; set {config.group_key} on every row or pass prompt_group_sizes"
            )
    if mixed := mixed_groups(index, columns):
        stale = "the sizes may be stale: " if index.group_source == "prompt_group_sizes" else ""
        warnings.append(
            f"{stale}rows with different {config.group_key} are in one group by {index.group_source}, in "
            f"{format_rows(mixed, 'group', 8)}"
        )
    if index.group_source == "prompt_group_sizes" and columns.nested_sizes not in (None, tuple(sizes or ())):
        warnings.append("the sizes may be stale: the input is nested into other groups, and the sizes win")
    pairs = [(row, other) for row, other in columns.id_collisions if index.row_rollout[row] == index.row_rollout[other]]
    if pairs:
        taken = sorted({other for _, other in pairs})
        warnings.append(
            f"{format_rows([row for row, _ in pairs])} with a rollout_id and {format_rows(taken)} without one count as "
            "one rollout where that rollout_id equals the other's index, although their own indices differ"
        )
    return warnings


def _ids_in_several_groups(index: RolloutIndex, first_row: Tensor) -> str:
    """Ids that name rollouts of several groups, in words; empty if there are none."""
    if index.rollout_column is None or index.num_groups < 2:
        return ""
    codes = index.rollout_column.codes.index_select(0, first_row)
    plain = codes.numpy() if codes.device.type == "cpu" else codes
    if bool((plain[1:] > plain[:-1]).all()):
        return ""
    codes, order = torch.sort(codes, stable=True)
    again = torch.nonzero(codes[1:] == codes[:-1])[:, 0] + 1
    if not len(again):
        return ""
    once = torch.cat([again[:1], again[1:][codes[again[1:]] != codes[again[:-1]]]])
    shown = index.rollout_column.labels_at(first_row[order[once[:8]]])
    rest = f" and {len(once) - 8} more" if len(once) > 8 else ""
    return f"rollout id{'' if len(once) == 1 else 's'} {', '.join(map(str, shown))}{rest}"


def mixed_groups(index: RolloutIndex, columns: RolloutColumns) -> list[int]:
    """Groups by recorded sizes or nesting whose rows have different group ids, where all rows have one."""
    if index.group_source not in ("prompt_group_sizes", "nesting") or columns.group is None:
        return []
    if _rows_without_group(columns.group, columns.padding):
        return []
    real = slice(None) if columns.padding is None else ~columns.padding
    codes, group = _with_adapter(columns.group, columns.adapter).codes[real], index.row_group[real]
    highest, lowest = (
        codes.new_zeros(index.num_groups).scatter_reduce_(0, group, codes, reduce, include_self=False)
        for reduce in ("amax", "amin")
    )
    groups: list[int] = torch.nonzero(highest != lowest)[:, 0].tolist()
    return groups
