"""A training run in a folder: what it is, how far it is, and everything that it needs to go on."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from learners import Learner
from step import Settings, prompts_of, roll_out, success_of, update

from miles_norm.audit.loggers import TensorBoardLogger
from miles_norm.session.engines.protocol import Engine

CHECKPOINT = "checkpoint.pt"
EVALUATION_PROMPTS, EVALUATION_SAMPLES, EVALUATION_SEED = 30, 8, 2**31


class Evaluation(NamedTuple):
    """Share of rollouts that opened every box."""

    success: float
    half_width: float
    """Of the 95% interval over prompts: rollouts of one prompt are not independent of each other."""
    rollouts: int

    def __str__(self) -> str:
        return f"{self.success:.1%} +- {self.half_width:.1%} of {self.rollouts} rollouts (95%, over prompts)"


class Run:
    """Trains a learner on an engine's rollouts and keeps a checkpoint after each step.

    In ``folder``: ``checkpoint.pt``, ``history.jsonl`` (a line of metrics per step), event files for TensorBoard, and
    ``weights/``, whose last ones the engine holds. Prompts and seeds of a step depend on the settings and its number
    alone, so a run that was interrupted and goes on ends as it would have.
    """

    def __init__(self, folder: Path, learner: Learner, settings: Settings) -> None:
        self.folder, self.learner, self.settings = folder, learner, settings
        self.optimizer = torch.optim.AdamW(learner.model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.step = 0
        self.before: Evaluation | None = None
        self.history: list[dict[str, float]] = []

    @property
    def checkpoint(self) -> Path:
        """File of the last step."""
        return self.folder / CHECKPOINT

    def resume(self) -> None:
        """Take up the last checkpoint.

        Raises:
            SystemExit: it is of a run with other settings.
        """
        held = torch.load(self.checkpoint, weights_only=True)
        asked = dataclasses.asdict(self.settings)
        differ = [
            f"{name} {value}, not {asked[name]}"
            for name, value in held["settings"].items()
            if value != asked[name] and name != "steps"
        ]
        if differ:
            raise SystemExit(f"{self.checkpoint} is of a run with {'; '.join(differ)}: resume it with its own settings")
        self.learner.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step, self.history = held["step"], held["history"]
        self.before = Evaluation(*held["before"]) if held["before"] else None

    async def train(self, address: str, engine: Engine, on_step: Callable[[dict[str, float]], object]) -> None:
        """All steps that are left."""
        await self.give(engine)
        logger = TensorBoardLogger(self.folder / "tensorboard")
        try:
            while self.step < self.settings.steps:
                rows = await self._roll_out(address)
                metrics = update(self.learner, self.optimizer, rows, self.settings)
                versions = {version for row in rows for version in row.weight_versions or ()}
                assert versions == {str(self.step)}, f"rows of step {self.step} carry the versions {sorted(versions)}"
                self.step += 1
                self.history.append({"step": self.step, **metrics})
                logger.log(metrics, self.step)
                await self.give(engine)
                self._save()
                on_step(metrics)
        finally:
            logger.close()

    async def _roll_out(self, address: str) -> Any:
        settings = self.settings
        rng = random.Random(f"{settings.seed} {self.step}")
        prompts = prompts_of(rng, settings.prompts_per_step)
        return await roll_out(address, prompts, settings.rollouts_per_prompt, rng.getrandbits(31))

    async def give(self, engine: Engine) -> None:
        """The weights, under the number of steps that they have seen."""
        weights = self.folder / "weights"
        weights.mkdir(parents=True, exist_ok=True)
        path = self.learner.save(weights / str(self.step))
        await engine.update_weights(path.resolve(), str(self.step))

    def _save(self) -> None:
        state = {
            "settings": dataclasses.asdict(self.settings),
            "model": self.learner.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "before": tuple(self.before or ()),
            "history": self.history,
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)  # whole or not at all
        (self.folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.history))


async def evaluate(address: str) -> Evaluation:
    """Success on tasks that are the same each time."""
    prompts = prompts_of(random.Random("evaluation"), EVALUATION_PROMPTS)
    rows = await roll_out(address, prompts, EVALUATION_SAMPLES, EVALUATION_SEED)
    of_prompts = [success_of([row for row in rows if row.group_index == number]) for number in range(len(prompts))]
    half_width = 1.96 * stdev(of_prompts) / len(of_prompts) ** 0.5
    return Evaluation(mean(of_prompts), half_width, len(prompts) * EVALUATION_SAMPLES)
