"""The embedded engine in use: requests that come and go, new weights, and an engine that is not running."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_engines import PROMPT, ask, fixed_policy, recomputed, run, same, sample, sharp_policy
from scripted import until

from miles_norm.errors import EngineRejectedError, EngineUnavailableError
from miles_norm.session.completion import Completion
from miles_norm.session.engines.embedded import EmbeddedEngine
from miles_norm.session.engines.embedded_batch import Batch
from miles_norm.session.engines.embedded_policy import EmbeddedPolicy


def test_late_requests_join_the_batch() -> None:
    async def use(engine: EmbeddedEngine) -> None:
        long = asyncio.create_task(engine.generate(ask(max_tokens=15_000, seed=0)))
        await asyncio.sleep(0)
        for seed in range(3):
            assert len((await engine.generate(ask(max_tokens=20, seed=seed))).token_ids) == 20
        assert not long.done()
        long.cancel()

    run(EmbeddedEngine(fixed_policy({65: 1.0})), use)


def test_a_cancelled_task_ends_its_own_generation_only() -> None:
    async def use(engine: EmbeddedEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(ask(max_tokens=10_000, seed=k))) for k in range(4)]
        waiting = asyncio.create_task(engine.generate(ask(max_tokens=10_000)))
        short = asyncio.create_task(engine.generate(ask(max_tokens=30, seed=9)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        tasks[1].cancel()
        # There are four slots: this one gets the one that was given up.
        assert len((await short).token_ids) == 30
        assert [task.done() for task in tasks] == [False, True, False, False]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len((await engine.generate(ask(max_tokens=5))).token_ids) == 5

    run(EmbeddedEngine(fixed_policy({65: 1.0}), slots=4), use)


def test_torch_works_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[tuple[str, int]] = set()
    advance = Batch.advance

    def noted(self: Batch) -> Any:
        threads.add((threading.current_thread().name, torch.get_num_threads()))
        return advance(self)

    monkeypatch.setattr(Batch, "advance", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sample(EmbeddedEngine(), ask(max_tokens=3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    [(name, number)] = threads
    assert name.startswith("embedded-engine")
    assert number == 1


def test_a_generation_is_of_one_version() -> None:
    """An update waits for what runs, and what comes later waits for the update."""
    old, new = sharp_policy(0), sharp_policy(1)

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        running = asyncio.create_task(engine.generate(ask(max_tokens=3_000, seed=1)))
        await until(lambda: any(engine._batch.generations))
        update = asyncio.create_task(engine.load_weights(new.state_dict(), "1"))
        await until(lambda: engine._updates)
        late = await engine.generate(ask(max_tokens=300, seed=2))
        assert update.done()
        return [await running, late]

    first, late = run(EmbeddedEngine(old, weight_version="0"), use)
    assert (first.weight_version, late.weight_version) == ("0", "1")
    assert np.abs(recomputed(old, PROMPT, first) - first.log_probs).max() < 1e-5
    assert np.abs(recomputed(new, PROMPT, late) - late.log_probs).max() < 1e-5


def test_training_the_policy_does_not_reach_the_engine() -> None:
    policy = sharp_policy()
    engine = EmbeddedEngine(policy)
    [before] = sample(engine, ask(max_tokens=30, seed=1))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    [after] = sample(engine, ask(max_tokens=30, seed=1))
    assert same(before, after)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    weights = EmbeddedPolicy().state_dict()
    weights["head.weight"] = weights["head.weight"][:5]
    weights["embedding.weight"] = weights["embedding.weight"].clone().fill_(torch.nan)
    weights["other"] = weights.pop("head.bias")
    (tmp_path / "text").write_text("no weights")

    async def use(engine: EmbeddedEngine) -> None:
        match = (
            r"head\.bias is missing; embedding\.weight has values that are no finite numbers; .*"
            r"head\.weight has shape \[5, 128\] instead of \[261, 128\]; other is unknown"
        )
        with pytest.raises(EngineRejectedError, match=match):
            await engine.load_weights(weights, "1")
        with pytest.raises(EngineRejectedError, match=r"weights .*text: .*header"):
            await engine.update_weights(tmp_path / "text", "1")
        with pytest.raises(EngineRejectedError, match=r"model\.safetensors: No such file or directory"):
            await engine.update_weights(tmp_path, "1")
        assert (await engine.generate(ask(max_tokens=3))).weight_version == "0"

    run(EmbeddedEngine(), use)


def test_an_engine_that_is_not_running() -> None:
    engine = EmbeddedEngine(fixed_policy({65: 1.0}))

    async def use() -> None:
        assert not await engine.health()
        for used in (engine.generate(ask()), engine.load_weights({}, "1"), engine.update_weights("x", "1")):
            with pytest.raises(EngineUnavailableError, match="not started"):
                await used
        await engine.close()
        await engine.start()
        assert await engine.health()
        running = asyncio.create_task(engine.generate(ask()))
        update = asyncio.create_task(engine.load_weights(engine_weights(), "1"))
        await asyncio.sleep(0.01)
        await engine.close()
        for task in (running, update):
            with pytest.raises(EngineUnavailableError, match="it was closed"):
                await task
        assert not await engine.health()
        await engine.start()
        assert len((await engine.generate(ask(max_tokens=3))).token_ids) == 3
        await engine.close()

    asyncio.run(use())


def engine_weights() -> dict[str, torch.Tensor]:
    return EmbeddedPolicy(8, 4).state_dict()


def test_when_sampling_breaks_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Batch) -> None:
        raise MemoryError("no room")

    async def use(engine: EmbeddedEngine) -> None:
        monkeypatch.setattr(Batch, "advance", broken)
        with pytest.raises(EngineUnavailableError, match="sampling failed: MemoryError: no room"):
            await engine.generate(ask())
        assert not await engine.health()

    run(EmbeddedEngine(), use)


def test_an_update_whose_weights_are_read_while_the_engine_closes_does_not_wait_for_ever() -> None:
    async def use() -> None:
        engine = EmbeddedEngine()
        await engine.start()
        update = asyncio.create_task(engine.load_weights(EmbeddedPolicy(seed=1).state_dict(), "1"))
        await asyncio.sleep(0)  # It has begun in the thread, and is not in line yet.
        assert not engine._updates
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="it was closed"):
            await asyncio.wait_for(update, 10)

    asyncio.run(use())
