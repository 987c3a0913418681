"""The engine that ``serve`` and ``rollout`` are told to use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_norm.errors import ConfigError, EngineRejectedError
from miles_norm.session.addresses import http_address
from miles_norm.storage.atomic import is_there

if TYPE_CHECKING:
    from miles_norm.session.engines.protocol import Engine

__all__ = ["EngineChoice"]


@dataclass(frozen=True)
class EngineChoice:
    """Which engine the options name; what can be checked without loading anything is checked when it is made.

    Raises:
        ConfigError: another name, or options that do not belong to it.
    """

    name: str
    url: str | None
    model: Path | None
    ready_within: float = 60
    """Seconds that it may take to serve."""

    def __post_init__(self) -> None:
        if not 0 <= self.ready_within < math.inf:
            raise ConfigError(
                "--engine-timeout",
                got=f"{self.ready_within:g}",
                expected="a number of seconds from 0",
                reason="an engine that is not ready by then will not be",
                remedy="write for example --engine-timeout 600 for a server that loads a large model",
            )
        if self.name == "embedded":
            if self.url is not None:
                raise _wrong_engine("--engine-url with the embedded engine", "the embedded engine has no address")
        elif self.name == "sglang":
            if self.url is None or self.model is None:
                named = (("--engine-url", self.url), ("--model", self.model))
                lacking = " and ".join(name for name, value in named if value is None)
                raise _wrong_engine(f"no {lacking}", "prompts are rendered and tokenized here, and sent there")
            http_address(self.url, "engine")
        else:
            raise _wrong_engine(self.name, "each is another way to sample")
        if self.model is not None and not is_there(self.model):
            raise self._wrong_model("no such file or folder")

    def make(self) -> Engine:
        """The engine, not started.

        Raises:
            ConfigError: the model is not one of this engine.
            DumpError, RenderingError: it cannot be read.
        """
        if self.name == "sglang":
            assert self.url is not None
            assert self.model is not None
            from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
            from miles_norm.session.engines.sglang import SGLangEngine

            return SGLangEngine(self.url, HuggingFaceRenderer(self.model))
        from miles_norm.session.engines.embedded import EmbeddedEngine
        from miles_norm.session.engines.embedded_policy import EmbeddedPolicy, load_weights

        policy = EmbeddedPolicy()
        if self.model is None:
            return EmbeddedEngine(policy)
        try:
            return EmbeddedEngine(policy.with_weights(load_weights(self.model)))
        except EngineRejectedError as error:
            raise self._wrong_model(error.got) from error

    def _wrong_model(self, got: str) -> ConfigError:
        embedded = self.name == "embedded"
        return ConfigError(
            f"--model {self.model}",
            got=got,
            expected="weights of the embedded policy" if embedded else "the folder of the model that the server runs",
            reason="replies are sampled with them" if embedded else "it has the tokenizer and the chat template",
            remedy="take what EmbeddedPolicy.save wrote, or no model for untrained weights" if embedded else "check it",
        )


def _wrong_engine(got: str, reason: str) -> ConfigError:
    return ConfigError(
        "engine",
        got=got,
        expected="--engine embedded [--model WEIGHTS], or --engine sglang --engine-url URL --model FOLDER",
        reason=reason,
        remedy="name the engine and what belongs to it",
    )
