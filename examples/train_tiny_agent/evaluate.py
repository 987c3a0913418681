"""Success of trained weights on the tasks of the evaluation, sampled as in training.

    python examples/train_tiny_agent/evaluate.py out/train/policy.safetensors
    python examples/train_tiny_agent/evaluate.py out/train/policy --engine sglang --engine-url http://127.0.0.1:30000

The embedded engine gives the same bits for the same weights, so it reaches exactly what ``train.py`` printed. An SGLang
server draws other samples each time.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer
from train import EngineName, console, run_command, start
from training_run import Evaluation, evaluate

from miles_norm.session.engines.protocol import wait_until_ready
from miles_norm.session.server import ServerConfig, running_server


def main(
    weights: Annotated[Path, typer.Argument(exists=True, help="File or folder that train.py wrote.")],
    engine: Annotated[EngineName, typer.Option(help="What samples.")] = "embedded",
    engine_url: Annotated[str | None, typer.Option(help="Of the SGLang server.")] = None,
) -> None:
    """Evaluate trained weights."""
    logging.getLogger("miles_norm").setLevel(logging.ERROR)
    _, served = start(engine, engine_url, weights)

    async def run() -> Evaluation:
        async with running_server(served, ServerConfig(port=0)) as address:
            await wait_until_ready(served, 60)
            if engine == "sglang":
                await served.update_weights(weights.resolve(), "evaluated")
            return await evaluate(address)

    console.print(f"success {asyncio.run(run())}")


if __name__ == "__main__":
    run_command(main)
