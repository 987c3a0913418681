"""What ``serve`` and ``rollout`` do: an engine, a session server, an agent that is run against it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from miles_norm.audit.summary import counted
from miles_norm.cli.inputs import key_and_value
from miles_norm.cli.terminal import show_lines
from miles_norm.cli.waiting import bar
from miles_norm.errors import ConfigError
from miles_norm.session.server.config import ServerConfig

if TYPE_CHECKING:
    from miles_norm.samples import Sample
    from miles_norm.session.engines.protocol import Engine
    from miles_norm.session.rollout import Agent, RolloutOptions

__all__ = [
    "EngineChoice",
    "aborted_rollouts",
    "api_key",
    "load_agent",
    "read_prompts",
    "request_kwargs",
    "roll_out",
    "run_server",
    "show_rollouts",
]

API_KEY = "MILES_NORM_API_KEY"
"""Environment variable with the key of the session server: a key on a command line is seen by everybody."""


@dataclass(frozen=True)
class EngineChoice:
    """Which engine the options name."""

    name: str
    url: str | None
    model: Path | None
    ready_within: float = 60
    """Seconds that it may take to serve."""

    def make(self) -> Engine:
        """The engine, not started.

        Raises:
            ConfigError: another name, or options that do not belong to it.
        """
        if self.name == "embedded":
            if self.url is not None:
                raise _wrong_engine("--engine-url with the embedded engine", "the embedded engine has no address")
            from miles_norm.session.engines.embedded import EmbeddedEngine
            from miles_norm.session.engines.embedded_policy import EmbeddedPolicy, load_weights

            policy = EmbeddedPolicy()
            return EmbeddedEngine(policy if self.model is None else policy.with_weights(load_weights(self.model)))
        if self.name == "sglang":
            if self.url is None or self.model is None:
                lacking = " and ".join(
                    name for name, value in (("--engine-url", self.url), ("--model", self.model)) if value is None
                )
                raise _wrong_engine(f"no {lacking}", "prompts are rendered and tokenized here, and sent there")
            from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
            from miles_norm.session.engines.sglang import SGLangEngine

            return SGLangEngine(self.url, HuggingFaceRenderer(self.model))
        raise _wrong_engine(self.name, "each is another way to sample")


def run_server(console: Console, choice: EngineChoice, config: ServerConfig) -> None:
    """Serve until interrupted."""
    from miles_norm.session.server import serve

    def started(address: str) -> None:
        show_lines(console, f"{address}/sessions on the engine {choice.name}; Ctrl-C ends it", head="serving ")

    serve(choice.make(), config, on_start=started)


def roll_out(
    agent: Agent, prompts: Sequence[Any], options: RolloutOptions, server: str | None, choice: EngineChoice
) -> list[Sample]:
    """Run an agent on prompts, against a server that runs or one made for it, with a bar."""
    from miles_norm.session.rollout import run_rollouts

    total, done = len(prompts) * options.n_samples_per_prompt, 0

    async def run() -> list[Sample]:
        async with _server(server, choice, options.api_key) as address:
            return await run_rollouts(agent, prompts, address, options, on_rollout=moved)

    with bar("rolling out") as progress:

        def moved(rows: Sequence[Sample]) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        return asyncio.run(run())


@asynccontextmanager
async def _server(address: str | None, choice: EngineChoice, api_key: str | None) -> AsyncIterator[str]:
    if address is not None:
        yield address
        return
    from miles_norm.session.engines.protocol import wait_until_ready
    from miles_norm.session.server import running_server

    engine = choice.make()
    async with running_server(engine, ServerConfig(port=0, api_key=api_key)) as own:
        await wait_until_ready(engine, choice.ready_within)
        yield own


def aborted_rollouts(rows: Sequence[Sample]) -> set[Any]:
    """Ids of the rollouts whose agent did not come to an end."""
    return {row.rollout_id for row in rows if row.status == "aborted" and "error" in row.metadata}


def show_rollouts(console: Console, rows: Sequence[Sample], path: Path) -> None:
    """Say what was written."""
    fan_out: dict[Any, int] = {}
    for row in rows:
        fan_out[row.rollout_id] = fan_out.get(row.rollout_id, 0) + 1
    aborted = len(aborted_rollouts(rows))
    text = f"{path}: {counted(len(rows), 'row')} of {counted(len(fan_out), 'rollout')}, "
    text += f"fan-out {min(fan_out.values())} to {max(fan_out.values())}"
    text += f"; {counted(aborted, 'rollout')} aborted, see metadata.error" if aborted else ""
    show_lines(console, text, head="wrote ", style="green")


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
        raise _wrong_agent(name, f"{type(error).__name__}: {error}") from error
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


def read_prompts(path: Path) -> list[Any]:
    """Prompts of a JSON lines file: a text, a list of messages, or an object with prompt, label, metadata per line.

    Raises:
        ConfigError: the file cannot be read, or lines that are no JSON; all are named.
    """
    try:
        # Not splitlines: JSON may hold other line separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise _wrong_prompts(path, getattr(error, "strerror", None) or str(error)) from None
    prompts, bad = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                bad.append(f"line {number}: {error}")
    if bad or not prompts:
        raise _wrong_prompts(path, "; ".join(bad[:10]) or "no prompts")
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


def _wrong_engine(got: str, reason: str) -> ConfigError:
    return ConfigError(
        "engine",
        got=got,
        expected="--engine embedded [--model WEIGHTS], or --engine sglang --engine-url URL --model FOLDER",
        reason=reason,
        remedy="name the engine and what belongs to it",
    )


def _wrong_agent(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"agent {name!r}",
        got=got,
        expected="package.module:function or path/to/file.py:function, an async function",
        reason="it is run once for every rollout",
        remedy="write: async def agent(*, base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None",
    )


def _wrong_prompts(path: Path, got: str) -> ConfigError:
    return ConfigError(
        f"prompts {path}",
        got=got,
        expected='JSON lines, each "a text", [messages], or {"prompt": ..., "label": ..., "metadata": {...}}',
        reason="the agent is given each of them",
        remedy="mend the lines that are named",
    )
