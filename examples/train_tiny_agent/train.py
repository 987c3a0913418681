"""Train a tiny policy to open boxes: serve it, roll out the agent, normalize, update, and serve what came out.

    python examples/train_tiny_agent/train.py out/train
    python examples/train_tiny_agent/evaluate.py out/train/policy.safetensors

With an SGLang server, whose weights are swapped from disk after every step (the server reads the folder, so it runs on
this machine or shares a disk with it):

    python -m sglang_cpu.tiny_model out/boxes
    python examples/session_v2_agentic/warm_start_sglang.py out/boxes --steps 250
    python -m sglang_cpu.serve out/boxes --port 30000
    python examples/train_tiny_agent/train.py out/train --engine sglang --engine-url http://127.0.0.1:30000 \\
        --model out/boxes
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from learners import EmbeddedLearner, HuggingFaceLearner, Learner
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from step import Normalization, Settings
from training_run import CHECKPOINT, Evaluation, Run, evaluate
from warm_start import warm_start

from miles_norm import MilesNormError
from miles_norm.session.engines.protocol import Engine, wait_until_ready
from miles_norm.session.server import ServerConfig, running_server

EngineName = Literal["embedded", "sglang"]
DEFAULT = Settings()
WARM_START_STEPS = 250
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[success]}"),
    TimeElapsedColumn(),
)
console = Console(highlight=False, soft_wrap=True)


def start(name: EngineName, url: str | None, model: Path) -> tuple[Learner, Engine]:
    """Weights on the trainer's side, and an engine that has or will be given them."""
    if name == "sglang":
        if url is None:
            raise typer.BadParameter("--engine sglang needs --engine-url, the address of the server")
        if not (model / "config.json").is_file():
            raise typer.BadParameter(f"{model} is no folder of a model in Hugging Face's format")
        from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
        from miles_norm.session.engines.sglang import SGLangEngine

        return HuggingFaceLearner(model), SGLangEngine(url, HuggingFaceRenderer(model))
    from miles_norm.session.engines.embedded import EmbeddedEngine

    learner = EmbeddedLearner(model)
    return learner, EmbeddedEngine(learner.model)


def warm_started(path: Path, seed: int, name: EngineName) -> Path:
    """Weights that imitate an agent that is often wrong."""
    if name == "sglang":
        raise typer.BadParameter("--engine sglang needs --model, the folder of the model that the server runs")
    if not path.exists():
        warm_start(WARM_START_STEPS, seed).save(path)
    return path


async def go(run: Run, engine: Engine) -> Evaluation:
    """Serve, train, and evaluate before and after."""
    async with running_server(engine, ServerConfig(port=0)) as address:
        await wait_until_ready(engine, 60)
        if run.before is None:
            await run.give(engine)
            run.before = await evaluate(address)
            console.print(f"success before {run.before}")
        with Progress(*COLUMNS, console=console) as progress:
            task = progress.add_task("training", total=run.settings.steps, completed=run.step, success="")

            def moved(metrics: dict[str, float]) -> None:
                progress.update(task, completed=run.step, success=f"success {metrics['train/success']:.0%}")

            await run.train(address, engine, moved)
        after = await evaluate(address)
        console.print(f"success after  {after}")
    return after


def main(
    out: Annotated[Path, typer.Argument(file_okay=False, help="Folder of the run.")],
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    seed: Annotated[int, typer.Option(min=0, help="Of the warm start, prompts and sampling.")] = DEFAULT.seed,
    normalization: Annotated[Normalization, typer.Option(help="What counts once.")] = DEFAULT.normalization,
    prompts_per_step: Annotated[int, typer.Option(min=1)] = DEFAULT.prompts_per_step,
    rollouts_per_prompt: Annotated[int, typer.Option(min=2)] = DEFAULT.rollouts_per_prompt,
    rollouts_per_update: Annotated[int, typer.Option(min=1)] = DEFAULT.rollouts_per_update,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = DEFAULT.learning_rate,
    engine: Annotated[EngineName, typer.Option(help="What samples.")] = "embedded",
    engine_url: Annotated[str | None, typer.Option(help="Of the SGLang server.")] = None,
    model: Annotated[Path | None, typer.Option(exists=True, help="Weights to begin with; else a warm start.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete the run in the folder.")] = False,
) -> None:
    """Train a tiny tool-using agent: a rollout counts once, however many rows its retries and sub-agents make."""
    torch.set_num_threads(1)  # the steps are too small to share
    # Groups of equal rewards are common once the policy is good.
    logging.getLogger("miles_norm").setLevel(logging.ERROR)
    if resume and force:
        raise typer.BadParameter("--resume goes on with a run and --force deletes it: choose one")
    found = (out / CHECKPOINT).exists()
    if found and force:
        shutil.rmtree(out)
    elif found and not resume:
        raise typer.BadParameter(f"{out} holds a run: go on with --resume, or delete it with --force")
    if resume and not found:
        raise typer.BadParameter(f"{out} holds no run that could be resumed")
    out.mkdir(parents=True, exist_ok=True)
    learner, chosen = start(engine, engine_url, model or warm_started(out / "warm_start.safetensors", seed, engine))
    settings = Settings(
        steps=steps,
        seed=seed,
        normalization=normalization,
        prompts_per_step=prompts_per_step,
        rollouts_per_prompt=rollouts_per_prompt,
        rollouts_per_update=rollouts_per_update,
        learning_rate=learning_rate,
    )
    run = Run(out, learner, settings)
    if resume:
        run.resume()
        if run.step >= steps:
            raise typer.BadParameter(f"the run in {out} has {run.step} steps already: name more with --steps")
    after = asyncio.run(go(run, chosen))
    path = learner.save(out / "policy")
    (out / "result.json").write_text(json.dumps({"before": run.before, "after": after}) + "\n")
    draw(run.history, out / "curve.svg")
    difference = max(line["train/log_prob_difference"] for line in run.history)
    console.print(f"log-probs of engine and trainer differ by {difference:.1e} at most")
    console.print(f"wrote {path}, {out}/curve.svg, {out}/history.jsonl and {out}/tensorboard")


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Success and fan-out over the steps."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    shown = {"train/success": "success of the rollouts", "miles_norm/fan_out_mean": "rows of a rollout"}
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        axis.plot([line["step"] for line in history], [line[name] for line in history], marker=".")
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
    figure.savefig(path)
    plt.close(figure)


def run_command(command: Callable[..., None]) -> None:
    """Read the command line; an error of the library is a message for whoever typed it."""
    try:
        typer.run(command)
    except MilesNormError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    run_command(main)
