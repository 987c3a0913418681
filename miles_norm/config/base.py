"""What all config models share: strict types, errors of our own tree, YAML in and out."""

from __future__ import annotations

import difflib
import re
import stat
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from miles_norm.errors import ConfigError, MissingDependencyError, shown

__all__ = ["Config", "as_yaml", "changed_settings", "parse_yaml", "refuse_contradictions"]


# YAML 1.1, which PyYAML follows, reads 1e-6 as a string; YAML 1.2 and everybody's eyes read a number.
_EXPONENT_FLOAT: Final = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class Config(BaseModel):
    """What all config models share: frozen, strict types, no unknown field, errors of our own tree,
    YAML in and out."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    _reference: ClassVar[str] = ""
    """Where all fields are described; unset: errors name them."""
    _harm: ClassVar[str] = "would change the training signal in silence"
    """What a setting that is not understood would do."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _config_error(type(self), error) from None

    # As in BaseModel: a nested model is then validated in place, and its problems are named from the outermost one.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def checked(cls, config: Self | None) -> Self:
        """``config`` itself, or the defaults where it is None.

        Raises:
            ConfigError: a value of another type.
        """
        if config is None:
            return cls()
        if not isinstance(config, cls):
            raise ConfigError(
                "config",
                got=f"a value of type {type(config).__name__}",
                expected=f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}",
                reason="settings are checked when the config is made",
                remedy=f"write {cls.__name__}(**settings), or {cls.__name__}.from_yaml(path)",
            )
        return config

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """Read a YAML file (a path) with one mapping of field names to values.

        Raises:
            ConfigError: no such file, no valid YAML, no mapping, a key twice, an unknown field, a wrong value.
            MissingDependencyError: PyYAML is not installed.
        """
        return cls(**cls.read_yaml(source))

    @classmethod
    def read_yaml(cls, source: str | Path) -> dict[str, Any]:
        """The mapping that a YAML file holds, its fields not checked yet.

        Raises:
            ConfigError: no such file, no valid YAML, no mapping, a key twice.
            MissingDependencyError: PyYAML is not installed.
        """
        try:
            text = _read_text(Path(source))
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            raise ConfigError(
                f"config file {source}",
                got="no such file" if missing else getattr(error, "strerror", None) or str(error),
                expected="a readable YAML file in UTF-8",
                reason="settings come from nowhere else",
                remedy="check the path",
            ) from None
        data = parse_yaml(text, str(source))
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"config file {source}",
                got=type(data).__name__ if data is not None else "an empty file",
                expected="one mapping of field names to values",
                reason="every setting has a name",
                remedy=f"write lines such as 'advantage_estimator: grpo'; fields: {', '.join(cls.model_fields)}",
            )
        return {str(key): value for key, value in data.items()}

    def to_yaml(self, *, comments: bool = False) -> str:
        """All fields with their values, defaults included; ``from_yaml`` reads it back to an equal model.

        With ``comments`` each field's documentation stands above it, and the values of a choice.
        """
        yaml = _yaml()

        class Dumper(yaml.SafeDumper):  # type: ignore[name-defined,misc]
            """Quotes the strings that our loader would read as numbers."""

        Dumper.add_implicit_resolver(*_EXPONENT_FLOAT)
        lines = []
        for name, field in type(self).model_fields.items():
            if comments and field.description:
                lines += [
                    f"# {line}".rstrip() for line in (*field.description.splitlines(), *_choices(field.annotation))
                ]
            value = getattr(self, name)
            if isinstance(value, Config):
                nested = value.to_yaml(comments=comments).splitlines()
                lines += [f"{name}:", *(f"  {line}" for line in nested)]
                continue
            entry = yaml.dump({name: list(value) if isinstance(value, tuple) else value}, Dumper=Dumper, width=10**6)
            lines.append(entry.rstrip("\n"))
        return "\n".join(lines) + "\n"


def changed_settings(config: Config) -> list[str]:
    """Every setting that is not at its default, as ``--set`` takes it.

    >>> from miles_norm import NormalizationConfig
    >>> changed_settings(NormalizationConfig(std_ddof=0, options={"whitening": "rollout"}))
    ['std_ddof=0', 'options.whitening=rollout']
    """
    changed = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            changed += [f"{name}.{text}" for text in changed_settings(value)]
        elif value != field.default:
            changed.append(f"{name}={as_yaml(value)}")
    return changed


def as_yaml(value: Any) -> str:
    """A value of a setting as ``--set`` takes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_text(path: Path) -> str:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
        raise ValueError("a path that is no regular file")  # a pipe or a device could go on for ever
    if info.st_size > _LARGEST_FILE:
        raise ValueError(f"a file of {info.st_size} bytes, which no settings fill")
    return path.read_text(encoding="utf-8")


_LARGEST_FILE = 2**20


def refuse_contradictions(model: str, checks: list[tuple[bool, str, str, str]]) -> None:
    """Raise the first contradiction of a list of (contradicts, got, reason, remedy)."""
    for contradicts, got, reason, remedy in checks:
        if contradicts:
            raise ConfigError(model, got=got, expected="settings that agree", reason=reason, remedy=remedy)


def _config_error(model: type[Config], error: ValidationError) -> ConfigError:
    problems = error.errors(include_url=False)
    for problem in problems:
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            return inner
    known = list(_paths(model))
    reference = model._reference or f"fields: {', '.join(model.model_fields)}"
    got, expected = [], []
    for problem in problems:
        name, value = ".".join(str(part) for part in problem["loc"]), problem["input"]
        message = _WORDS.get(problem["type"]) or problem["msg"][:1].lower() + problem["msg"][1:]
        if problem["type"] == "extra_forbidden":
            while isinstance(value, Mapping) and len(value) == 1:
                [(key, value)] = value.items()
                name = f"{name}.{key}"
            message = _unknown(name, known)
        got.append(f"{name}={shown(value)}")
        expected.append(f"{name}: {message}")
    return ConfigError(
        model.__name__,
        got=", ".join(got),
        expected="; ".join(expected),
        reason=f"a setting that is not understood {model._harm}",
        remedy=f"correct or remove what is named above; {reference}",
    )


_WORDS: Final = {
    "tuple_type": "input should be a list, such as [a, b]",
    "model_type": "input should be a mapping of field names to values",
}
"""Where pydantic's message speaks of Python's types."""


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Names of all fields; those of a nested model with dots."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{prefix}{name}.")


def _unknown(name: str, known: list[str]) -> str:
    """Say what was meant by a field that does not exist."""
    outer, _, last = name.rpartition(".")
    if name in known:
        return f"no such field at this level ({last!r} stands indented below '{outer}:')"
    prefix = f"{outer}." if outer in known else ""
    level = [path.removeprefix(prefix) for path in known if path.startswith(prefix)]
    close = [path for path in known if path.rpartition(".")[2] == last]
    close = close or [prefix + path for path in difflib.get_close_matches(name.removeprefix(prefix), level, n=1)]
    if close:
        return f"no such field (did you mean {' or '.join(map(repr, close))}?)"
    return f"no such field (those of {outer!r}: {', '.join(level)})" if prefix else "no such field"


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is not Literal:
        return []
    return textwrap.wrap(f"One of: {', '.join(map(str, get_args(annotation)))}.", 98)


# What PyYAML raises on values that their tags do not fit, such as !!int "".
_BROKEN_VALUES: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML without constructing objects; ``1e-6`` is a number, and a key given twice is an error.

    Raises:
        ConfigError: ``text`` is no valid YAML; the message names ``name`` and the line.

    >>> parse_yaml("std_epsilon: 1e-6", "example")
    {'std_epsilon': 1e-06}
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined,misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(str(key.value) for key, _ in node.value)
            twice = sorted(key for key, count in keys.items() if count > 1)
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"keys given twice: {', '.join(twice)}", node.start_mark
                )
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few aliases of aliases unfold into a structure that fills any memory, and settings need none.
            if self.check_event(yaml.events.AliasEvent):
                event = self.peek_event()
                raise yaml.composer.ComposerError(None, None, f"an alias, *{event.anchor}", event.start_mark)
            return super().compose_node(parent, index)

    Loader.add_implicit_resolver(*_EXPONENT_FLOAT)
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, *_BROKEN_VALUES) as error:
        raise ConfigError(
            f"YAML in {name}",
            got=_yaml_problem(error),
            expected="valid YAML",
            reason="settings are not guessed from broken text",
            remedy="correct the YAML at that place; quote texts that hold a colon, a bracket or a #",
        ) from None


def _yaml_problem(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem and mark:
        return f"{problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split()) or type(error).__name__


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependencyError(
            "YAML configs",
            got="no package 'yaml'",
            expected="PyYAML",
            reason="the core has no YAML parser of its own",
            remedy="pip install 'miles-norm[yaml]'",
        ) from None
    return yaml
