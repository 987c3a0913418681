"""Train a tiny policy to open boxes: serve it, roll out the agent, normalize, update, and serve what came out.

    python examples/train_tiny_agent/train.py out/train
    python examples/train_tiny_agent/evaluate.py out/train/policy.safetensors

With an SGLang server, whose weights are swapped from disk after every step (the server reads the folder, so it runs on
this machine or shares a disk with it):

    python -m sglang_cpu.tiny_model out/boxes
    python examples/session_v2_agentic/warm_start_sglang.py out/boxes --steps 250
    python -m sglang_cpu.serve out/boxes --port 30000
    python examples/train_tiny_agent/train.py out/train --engine sglang --engine-url http://127.0.0.1:30000 --model out/boxes
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from learners import EmbeddedLearner, HuggingFaceLearner, Learner
from loop import NORMALIZATIONS, Settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from run import Run, evaluate

from miles_norm.session.engines.protocol import Engine, wait_until_ready
from miles_norm.session.server import ServerConfig, running_server

DEFAULT = Settings()
WARM_START_STEPS = 250
console = Console(highlight=False)


class EngineName(StrEnum):
    """What samples."""

    embedded = "embedded"
    sglang = "sglang"


Normalization = StrEnum("Normalization", {name: name for name in NORMALIZATIONS})


def start(folder: Path, name: EngineName, url: str | None, model: Path | None) -> tuple[Learner, Engine]:
    """The policy as it is before any training, and an engine for it."""
    if name is EngineName.sglang:
        if url is None or model is None:
            raise typer.BadParameter("--engine sglang needs --engine-url and --model, the folder of the model it runs")
        from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
        from miles_norm.session.engines.sglang import SGLangEngine

        return HuggingFaceLearner(model), SGLangEngine(url, HuggingFaceRenderer(model))
    from miles_norm.session.engines.embedded import EmbeddedEngine

    if model is None:
        model = folder / "warm_start.safetensors"
        if not model.exists():
            from warm_start import warm_start

            warm_start(WARM_START_STEPS).save(model)
    learner = EmbeddedLearner(model)
    return learner, EmbeddedEngine(learner.model)


async def go(run: Run, engine: Engine) -> None:
    """Serve, train, evaluate before and after."""
    async with running_server(engine, ServerConfig(port=0)) as address:
        await wait_until_ready(engine, 60)
        if run.step == 0:
            await run.give(engine)
            show("before", *await evaluate(address))
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[success]}"), TimeElapsedColumn()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=run.settings.steps, completed=run.step, success="")

            def moved(metrics: dict[str, float]) -> None:
                progress.update(task, completed=run.step, success=f"success {metrics['train/success']:.0%}")

            await run.train(address, engine, moved)
        show("after", *await evaluate(address))


def show(when: str, success: float, half_width: float, rollouts: int) -> None:
    """One line on an evaluation."""
    console.print(f"success {when:<6} {success:.1%} +- {half_width:.1%} (95%, over prompts) of {rollouts} rollouts")


def main(
    out: Annotated[Path, typer.Argument(help="Folder of the run.")],
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and sampling.")] = DEFAULT.seed,
    normalization: Annotated[Normalization, typer.Option(help="What counts once.")] = Normalization(DEFAULT.normalization),
    engine: EngineName = EngineName.embedded,
    engine_url: Annotated[str | None, typer.Option(help="Of the SGLang server.")] = None,
    model: Annotated[Path | None, typer.Option(exists=True, help="Weights to start from; without, a warm start.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run that is in the folder.")] = False,
    force: Annotated[bool, typer.Option(help="Delete the run that is in the folder.")] = False,
) -> None:
    """Train a tiny tool-using agent with one reward and one weight per rollout."""
    torch.set_num_threads(1)  # the steps are too small to share
    logging.getLogger("miles_norm").setLevel(logging.ERROR)  # groups of equal rewards are common here
    if force:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    learner, chosen = start(out, engine, engine_url, model)
    run = Run(out, learner, Settings(steps=steps, seed=seed, normalization=normalization.value))
    if run.checkpoint.exists() != resume:
        raise typer.BadParameter(f"{out} holds a run: --resume or --force" if not resume else f"no run in {out}")
    if resume:
        run.resume()
    asyncio.run(go(run, chosen))
    path = learner.save(out / "policy")
    if engine is EngineName.sglang:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (model / name).exists():
                shutil.copy(model / name, path)
    draw(run.history, out / "curve.svg")
    console.print(f"wrote {path}, {out}/curve.svg, history.jsonl, tensorboard/")


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Success, rows per rollout and the change of the weights over the steps."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, (name, title) in zip(axes, (("train/success", "success of the rollouts"), ("miles_norm/fan_out_mean", "rows of a rollout")), strict=True):
        axis.plot([line["step"] for line in history], [line[name] for line in history], marker=".")
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
