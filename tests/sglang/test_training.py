"""examples/train_tiny_agent on a real SGLang server, whose weights are swapped after every step."""

import sys
from pathlib import Path

import pytest
from sglang_servers import Models, Server

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny_agent"))

from learners import HuggingFaceLearner
from step import Settings
from training_run import Run

from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.engines.sglang import SGLangEngine
from miles_norm.session.server import ServerConfig, running_server

pytestmark = pytest.mark.anyio

STEPS = 10


async def test_ten_updates_reach_the_server_and_its_log_probs_are_the_trainers(
    sglang: Server, models: Models, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="make test-sglang installs the extra training")
    learner = HuggingFaceLearner(models.first)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    settings = Settings(steps=STEPS, prompts_per_step=3, rollouts_per_prompt=4, rollouts_per_update=12)
    run = Run(tmp_path, learner, settings)
    engine = SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))
    async with running_server(engine, ServerConfig(port=0)) as address:
        # It checks that all rows of a step carry the number of steps that their weights have seen.
        await run.train(address, engine, lambda metrics: None)
    assert [line["step"] for line in run.history] == list(range(1, STEPS + 1))
    assert sum(line["train/updates"] for line in run.history) >= STEPS
    assert all(line["train/log_prob_difference"] < 1e-4 for line in run.history)
    # Samples differ from run to run: all groups of a step may have equal rewards, and then it changes nothing.
    assert any(line["train/grad_norm"] > 0 for line in run.history)
    changed = [name for name, value in learner.model.state_dict().items() if not before[name].equal(value)]
    assert len(changed) == len(before)
