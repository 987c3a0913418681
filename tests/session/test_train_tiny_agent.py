"""examples/train_tiny_agent: fewer and smaller steps of what make demo-train does."""

import asyncio
import dataclasses
import json
import random
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "session_v2_agentic"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny_agent"))

from learners import EmbeddedLearner
from step import NORMALIZATIONS, Settings, padded, prompts_of, roll_out, update
from training_run import Run
from warm_start import warm_start

from miles_norm import Sample
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.server import ServerConfig, running_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_agent"
SMALL = Settings(steps=3, prompts_per_step=3, rollouts_per_prompt=4, rollouts_per_update=6)


@pytest.fixture(scope="module", name="weights")
def fixture_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    warm_start(100).save(path)
    return path


def served(learner: EmbeddedLearner, use: Callable[[str, EmbeddedEngine], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        engine = EmbeddedEngine(learner.model)
        async with running_server(engine, ServerConfig(port=0)) as address:
            return await use(address, engine)

    return asyncio.run(go())


@pytest.fixture(scope="module", name="rows")
def fixture_rows(weights: Path) -> list[Sample]:
    prompts = prompts_of(random.Random(0), 3)
    return served(EmbeddedLearner(weights), lambda address, _: roll_out(address, prompts, 4, seed=1))


def trained(folder: Path, weights: Path, settings: Settings, *, resume: bool = False) -> Run:
    run = Run(folder, EmbeddedLearner(weights), settings)
    if resume:
        run.resume()
    served(run.learner, lambda address, engine: run.train(address, engine, lambda metrics: None))
    return run


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(weights: Path, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", weights, SMALL)
    trained(tmp_path / "cut", weights, dataclasses.replace(SMALL, steps=2))
    resumed = trained(tmp_path / "cut", weights, SMALL, resume=True)
    assert resumed.history == whole.history
    assert len(whole.history) == 3
    begun = EmbeddedLearner(weights).model.state_dict()
    for name, value in whole.learner.model.state_dict().items():
        assert torch.equal(resumed.learner.model.state_dict()[name], value)
        assert not torch.equal(begun[name], value), f"{name} was not trained"
    lines = [json.loads(line) for line in (tmp_path / "cut" / "history.jsonl").read_text().splitlines()]
    assert lines == whole.history
    assert all(line["train/updates"] == 2 for line in lines)
    assert all(line["train/log_prob_difference"] < 1e-4 for line in lines)


def test_a_run_with_other_settings_is_not_resumed(weights: Path, tmp_path: Path) -> None:
    trained(tmp_path, weights, dataclasses.replace(SMALL, steps=1))
    other = Run(tmp_path, EmbeddedLearner(weights), dataclasses.replace(SMALL, seed=5, learning_rate=1e-2))
    with pytest.raises(SystemExit, match=r"a run with seed 0, not 5; learning_rate 0\.0005, not 0\.01: resume it"):
        other.resume()


def test_seeds_bring_the_same_rollouts_again_and_retries_differ(weights: Path, rows: list[Sample]) -> None:
    prompts = prompts_of(random.Random(0), 3)
    learner = EmbeddedLearner(weights)
    again = served(learner, lambda address, _: roll_out(address, prompts, 4, seed=1))
    other = served(learner, lambda address, _: roll_out(address, prompts, 4, seed=2))
    tokens = [[list(map(int, row.tokens)) for row in found] for found in (rows, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    # Siblings with the same prompt are replies to one question: were seeds alike, so would be they.
    assert len(rows) > len({row.rollout_id for row in rows})
    assert len({tuple(found) for found in tokens[0]}) > len({row.rollout_id for row in rows})


def test_log_probs_and_gradients_are_those_of_a_plain_forward(weights: Path, rows: list[Sample]) -> None:
    tokens, mask, sampled = padded(rows)
    learner = EmbeddedLearner(weights)
    found = learner.log_probs(tokens, mask)
    found.sum().backward()
    gradients = {name: value.grad.clone() for name, value in learner.model.named_parameters()}
    learner.model.zero_grad()
    plain = learner.model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0][mask[:, 1:]]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, sampled[mask], rtol=0, atol=1e-4)
    plain.sum().backward()
    for name, value in learner.model.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-3, atol=1e-3)


def test_each_normalization_takes_another_step(weights: Path, rows: list[Sample]) -> None:
    steps = {}
    for name in NORMALIZATIONS:
        learner = EmbeddedLearner(weights)
        before = learner.model.head.weight.detach().clone()
        metrics = update(
            learner,
            torch.optim.SGD(learner.model.parameters(), lr=1.0),
            rows,
            dataclasses.replace(SMALL, normalization=name, rollouts_per_update=12),
        )
        assert metrics["train/grad_norm"] > 0
        steps[name] = learner.model.head.weight.detach() - before
    names = list(steps)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert not torch.allclose(steps[names[first]], steps[names[second]], rtol=1e-2)


def command(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, EXAMPLE / name, *arguments]
    return subprocess.run([str(part) for part in program], capture_output=True, text=True, timeout=300, check=False)


def test_saved_weights_reach_the_success_that_was_printed(weights: Path, tmp_path: Path) -> None:
    small = ("--steps", 1, "--prompts-per-step", 3, "--rollouts-per-prompt", 4)
    done = command("train.py", tmp_path, "--model", weights, *small)
    assert done.returncode == 0, done.stderr
    (success,) = re.findall(r"success after +(.*)", done.stdout)
    again = command("evaluate.py", tmp_path / "policy.safetensors")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == f"success {success}"
    assert {path.name for path in tmp_path.iterdir()} >= {"curve.svg", "history.jsonl", "result.json", "tensorboard"}
    refused = command("train.py", tmp_path, "--model", weights)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert (tmp_path / "policy.safetensors").exists()
