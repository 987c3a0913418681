"""From arguments to a normalized batch: config, group sizes, dump."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_norm.cli.waiting import bar, status
from miles_norm.config import NormalizationConfig, parse_yaml
from miles_norm.config.base import Config
from miles_norm.errors import ConfigError, DumpError, GroupingError, SampleError

if TYPE_CHECKING:
    from miles_norm.columns import RolloutColumns
    from miles_norm.dumps import DumpStream
    from miles_norm.result import NormalizedRewards
    from miles_norm.storage.field_tables import FieldStream

__all__ = [
    "ADDED_KEYS",
    "Batch",
    "group_sizes",
    "kept_warnings",
    "key_and_value",
    "load",
    "parse_sizes",
    "read_config",
    "read_settings",
    "reading",
]

_SIZES = "prompt_group_sizes"


ADDED_KEYS = ("advantage", "trained", "rollout_reward")
"""What ``normalize -o`` adds to each row."""


@dataclass(frozen=True)
class Batch:
    """A dump and what normalization made of it. The rows are not kept: they are read again where they are needed."""

    path: Path
    rollout_id: int | None
    result: NormalizedRewards
    rows_with_added_keys: list[int]
    """Rows that have one of the keys already which ``normalize -o`` adds."""
    sizes_from_dump: bool
    warnings: list[str]
    """Those of the result, then those about the file."""


def read_config(path: Path | None, settings: Sequence[str]) -> NormalizationConfig:
    """The settings of a normalization, on a device that exists.

    Raises:
        ConfigError: as ``read_settings``, or no such device.
    """
    config = NormalizationConfig(**read_settings(NormalizationConfig, path, settings))
    if config.device is not None:
        _check_device(config.device)
    return config


def read_settings(model: type[Config], path: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """The settings of a YAML file, and over them ``key=value`` texts whose values are YAML, in their order.

    ``options.whitening=rollout`` sets one field of a nested model, ``options={whitening: rollout}`` those that it
    names; the others stay as the file or an earlier text has them.

    Raises:
        ConfigError: a file that cannot be read, a value that is no YAML, or a text without ``=``.
    """
    given = {} if path is None else model.read_yaml(path)
    for text in settings:
        key, nested = key_and_value(
            text,
            "--set",
            expected="a field, an equals sign and a YAML value",
            reason="every setting has a name",
            remedy=f"write for example --set {next(iter(model.model_fields))}=VALUE; "
            f"fields: {', '.join(model.model_fields)}",
        )
        for name in reversed(key.split(".")):
            nested = {name: nested}
        given = _merged(given, nested)
    return given


def key_and_value(text: str, option: str, *, expected: str, reason: str, remedy: str) -> tuple[str, Any]:
    """The two sides of ``key=value``, the value read as YAML.

    Raises:
        ConfigError: a text without ``=`` or without a key, or a value that is no YAML.
    """
    key, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not all(key.split(".")):
        raise ConfigError(f"{option} {text}", got="no key=value", expected=expected, reason=reason, remedy=remedy)
    return key, parse_yaml(value, f"{option} {key}")


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one; where both hold a mapping, so do these."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        from miles_norm.normalize import device_error

        raise device_error(device, error) from None


def load(path: Path, config: NormalizationConfig, sizes: str | None) -> Batch:
    """Read a dump and normalize it.

    Args:
        path: The dump.
        config: The settings.
        sizes: Rows per prompt group, separated by commas; ``none`` ignores those of the dump; None takes them.
    """
    if sizes is not None and sizes != "none":
        parse_sizes(sizes)  # refused before the file is read
    taken: list[int] = []
    with kept_warnings() as about_file:
        columns, stream = _from_fields(path, config, taken) or _from_rows(path, config, taken)
    given = group_sizes(path, stream.metadata, sizes)
    from_dump = sizes is None and given is not None
    with status("normalizing"), kept_warnings():
        from miles_norm.normalize import normalize_columns

        try:
            result = normalize_columns(columns, config, given)
        except GroupingError as error:
            if from_dump and error.subject == _SIZES:
                raise _stale(path, error) from None
            raise
    return Batch(path, stream.rollout_id, result, taken, from_dump, [*result.warnings, *about_file])


def _from_rows(
    path: Path, config: NormalizationConfig, taken: list[int]
) -> tuple[RolloutColumns, DumpStream | FieldStream]:
    """The index columns of a dump, read row by row."""
    with reading(path) as stream:
        from miles_norm.columns import columns_from_rows

        return columns_from_rows(_noting(stream.rows, taken), config), stream


def _from_fields(
    path: Path, config: NormalizationConfig, taken: list[int]
) -> tuple[RolloutColumns, DumpStream | FieldStream] | None:
    """The index columns of a columnar dump, of which nothing else is read; None for another dump.

    None as well where rows are wrong: parts do not know their numbers in the whole, so that reading row by row names
    them.
    """
    from miles_norm.columns import RolloutColumns, columns_from_fields, index_fields
    from miles_norm.storage.field_tables import stream_fields

    with bar(f"reading {path.name}") as progress:
        stream = stream_fields(path, {*index_fields(config), *ADDED_KEYS}, progress=progress)
        if stream is None:
            return None
        parts, first = [], 0
        try:
            for table in stream.tables:
                parts.append(columns_from_fields(table.fields.get, table.num_rows, config))
                taken += [first + row for row in _with_added_keys(table.fields)]
                first += table.num_rows
            return RolloutColumns.concat(parts), stream
        except SampleError:
            taken.clear()
            return None


def _with_added_keys(fields: Mapping[str, list[Any]]) -> list[int]:
    present = [values for name in ADDED_KEYS if (values := fields.get(name)) is not None]
    return [row for row, values in enumerate(zip(*present, strict=True)) if any(value is not None for value in values)]


@contextmanager
def reading(path: Path) -> Iterator[DumpStream]:
    """The dump as a stream whose rows are taken in the body, with a sign of life."""
    if path.suffix.lower() in (".pt", ".safetensors"):
        with status(f"reading {path.name}"):
            from miles_norm.dumps import stream_dump

            yield stream_dump(path)
        return
    from miles_norm.dumps import stream_dump

    with bar(f"reading {path.name}") as progress:
        yield stream_dump(path, progress=progress)


def _noting(rows: Iterable[dict[str, Any]], taken: list[int]) -> Iterator[dict[str, Any]]:
    """The rows, while the numbers of those that have an added key already are noted."""
    for number, row in enumerate(rows):
        if not row.keys().isdisjoint(ADDED_KEYS):
            taken.append(number)
        yield row


def group_sizes(path: Path, metadata: Mapping[str, Any], sizes: str | None) -> list[Any] | None:
    """Rows per prompt group: as the option gives them, else as the dump records them; ``none`` takes neither."""
    if sizes is not None:
        return None if sizes == "none" else parse_sizes(sizes)
    return None if metadata.get(_SIZES) is None else _recorded_sizes(path, metadata[_SIZES])


def parse_sizes(text: str) -> list[int]:
    """The numbers of ``--prompt-group-sizes``.

    Raises:
        ConfigError: something else than whole numbers separated by commas.
    """
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ConfigError(
            "--prompt-group-sizes",
            got=repr(text),
            expected="whole numbers separated by commas, or none",
            reason="each is the number of rows of one prompt group",
            remedy="write for example --prompt-group-sizes 8,6,5,6",
        ) from None


def _recorded_sizes(path: Path, value: Any) -> list[Any]:
    sizes = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(sizes, list | tuple):
        raise DumpError(
            f"prompt_group_sizes in the metadata of {path}",
            got=f"a value of type {type(value).__name__}",
            expected="a list with the number of rows of each prompt group",
            reason="recorded sizes form the groups before anything else does",
            remedy="pass --prompt-group-sizes, or --prompt-group-sizes none to ignore what the dump recorded",
        )
    return list(sizes)


def _stale(path: Path, error: GroupingError) -> GroupingError:
    return GroupingError(
        f"prompt_group_sizes in the metadata of {path}",
        got=error.got,
        expected=error.expected,
        reason=error.reason,
        remedy=f"{error.remedy}; --prompt-group-sizes none ignores what the dump recorded",
        rows=error.rows,
    )


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._seen: dict[str, tuple[int, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        place, times = self._seen.get(text, (len(self.texts), 0))
        self._seen[text] = place, times + 1
        self.texts[place : place + 1] = [f"{text} ({times + 1} times)" if times else text]


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collect what the library logs in the body instead of letting it print: the commands show warnings themselves.

    What is logged several times is there once, with how often.
    """
    logger = logging.getLogger("miles_norm")
    keeper, handlers, propagate = _Keeper(), logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [keeper], False
    try:
        yield keeper.texts
    finally:
        logger.handlers, logger.propagate = handlers, propagate
