"""What ``rollout`` reads before it runs: the agent, its prompts, and the settings of its requests."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_norm.cli.inputs import key_and_value
from miles_norm.errors import ConfigError
from miles_norm.session.batch import Prompt, wrong_prompts

if TYPE_CHECKING:
    from miles_norm.session.batch import Agent

__all__ = ["api_key", "load_agent", "read_prompts", "request_kwargs"]

API_KEY = "MILES_NORM_API_KEY"
"""Environment variable with the key of the session server: a key on a command line is seen by everybody."""

_SIGNATURE = "write: async def agent(*, base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None"


def load_agent(name: str) -> Agent:
    """The agent that ``package.module:function`` or ``path/to/file.py:function`` names.

    Raises:
        ConfigError: no such module, file or function, or one that is not async.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise _wrong_agent(name, "no module and function")
    try:
        module = _module(place)
    except (Exception, SystemExit) as error:  # Importing an agent runs its code.
        raise _wrong_agent(
            name, f"{type(error).__name__}: {error}", "check the path, and what the file runs"
        ) from error
    agent = getattr(module, function, None)
    if not callable(agent):
        raise _wrong_agent(name, f"no function {function} in {place}")
    if not (asyncio.iscoroutinefunction(agent) or asyncio.iscoroutinefunction(type(agent).__call__)):
        raise _wrong_agent(name, f"{function}, which is not async")
    return agent  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        # As python -m has it: what lies in the working directory can be named.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return importlib.import_module(place)
    path = Path(place).resolve(strict=True)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON lines file: a text, a list of messages, or an object with prompt, label, metadata per line.

    Raises:
        ConfigError: the file cannot be read, or lines that are no prompts; they are named, counted from 1.
    """
    try:
        # Not splitlines: JSON may hold other line separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"prompts {path}",
            got=getattr(error, "strerror", None) or str(error),
            expected="a file in UTF-8 that can be read, with a prompt on each line",
            reason="the agent is given each of them",
            remedy="check the path",
        ) from None
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(Prompt.of(json.loads(line)))
            except json.JSONDecodeError as error:
                problems.append(f"line {number}: no JSON, {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
    if problems or not prompts:
        raise wrong_prompts(f"prompts {path}", problems)
    return prompts


def api_key() -> str | None:
    """The key of the session server, from the environment."""
    return os.environ.get(API_KEY) or None


def request_kwargs(texts: Sequence[str]) -> Mapping[str, Any]:
    """``key=value`` texts whose values are YAML, for the agent's requests.

    Raises:
        ConfigError: a text without ``=``.
    """
    return dict(
        key_and_value(
            text,
            "--request",
            expected="a field of a chat completion request, an equals sign and a YAML value",
            reason="the agent is given it for its requests",
            remedy="write for example --request temperature=0.7",
        )
        for text in texts
    )


def _wrong_agent(name: str, got: str, remedy: str = _SIGNATURE) -> ConfigError:
    return ConfigError(
        f"agent {name!r}",
        got=got,
        expected="package.module:function or path/to/file.py:function, an async function",
        reason="it is run once for every rollout",
        remedy=remedy,
    )
