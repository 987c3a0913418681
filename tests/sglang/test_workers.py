"""Routers before real SGLang servers, and servers that die; the last tests, since they leave one dead."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conversations import user
from scripted import Api, served, until
from sglang_servers import (
    START_SECONDS,
    Models,
    Server,
    Transformers,
    begun_session,
    known_workers,
    router,
    running,
    running_requests,
    sglang_server,
)

from miles_norm.errors import EngineUnavailableError
from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.engines.protocol import wait_until_ready
from miles_norm.session.engines.sglang import SGLangEngine

pytestmark = pytest.mark.anyio

SHORT = {"max_tokens": 30, "stop": ["e", "\n"]}
LONG = {"max_tokens": 700, "ignore_eos": True}


async def test_a_router_that_drops_input_ids_is_named(sglang: Server, models: Models, tmp_path: Path) -> None:
    with running(router("sglang_router", [sglang], tmp_path / "router.log")) as dropping:
        async with served(SGLangEngine(dropping.url, HuggingFaceRenderer(models.first))) as api:
            session = await api.create()
            asked = sglang.served("/v1/chat/completions")
            status, body = await api.try_turn(session, [user("0 so far, box 1")], **SHORT)
            assert (status, body["error"]["code"]) == (502, "EngineContractError")
            assert "no meta_info in choices[0]" in body["error"]["message"]
            assert "use a router that passes every field on (smg does, sglang-router drops" in body["error"]["message"]
            assert sglang.served("/v1/chat/completions") == asked + 1
            assert await api.turns(session) == []


@pytest.fixture(name="second")
def fixture_second(sglang: Server, models: Models, tmp_path: Path) -> Iterator[Server]:
    with running(sglang_server(models.second, tmp_path / "second.log")) as server:
        yield server


async def workers_of_turns(api: Api, session: str, turns: int, workers: list[Server]) -> tuple[list[str], list[int]]:
    """Response ids of some turns, and how many of them each worker served."""
    before = [worker.served("/v1/chat/completions") for worker in workers]
    ids = [(await api.turn(session, [user(f"{turn} so far, box 1")], **SHORT))["id"] for turn in range(turns)]
    return ids, [worker.served("/v1/chat/completions") - count for worker, count in zip(workers, before, strict=True)]


async def test_sessions_stick_to_a_worker_and_outlive_it(
    sglang: Server, second: Server, models: Models, tmp_path: Path
) -> None:
    workers = [sglang, second]
    options = ("--policy", "manual", "--assignment-mode", "min_group")
    with running(router("smg", workers, tmp_path / "smg.log", *options)) as smg:
        urls = [worker.url for worker in workers]

        async def known_all() -> bool:
            return await known_workers(smg) == len(workers)

        engine = SGLangEngine(smg.url, HuggingFaceRenderer(models.first), workers=urls)
        async with served(engine) as api:
            await until(known_all)
            await engine.update_weights(models.first, "both")
            sessions = [await api.create() for _ in range(6)]
            acknowledged, at_home = {}, {}
            for session in sessions:
                acknowledged[session], served_by = await workers_of_turns(api, session, 3, workers)
                assert sorted(served_by) == [0, 3]
                at_home[session] = workers[served_by.index(3)]
            assert set(at_home.values()) == set(workers)

            orphans = [session for session in sessions if at_home[session] is second]
            turn = asyncio.create_task(api.turn(orphans[0], [user("mid-turn")], **LONG))
            await until(lambda: running_requests(second))
            second.kill()
            acknowledged[orphans[0]].append((await turn)["id"])
            for session in sessions:
                ids, served_by = await workers_of_turns(api, session, 2, workers)
                assert served_by == [2, 0]
                acknowledged[session] += ids
                assert await api.turns(session) == acknowledged[session]
                rows = await api.rows(session, index=0, picker="keep_all")
                assert sorted(row.metadata["leaf"]["response_id"] for row in rows) == sorted(acknowledged[session])
                assert {version for row in rows for version in row.weight_versions} == {"both"}
            assert await engine.health()


async def test_a_server_that_is_killed_costs_its_turns_and_no_session(
    sglang: Server, models: Models, transformers: Transformers
) -> None:
    engine = SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))
    async with served(engine) as api:
        await engine.update_weights(models.second, "2")
        session, begun = await begun_session(api, "0 so far, box 1", **SHORT)
        conversation = [*begun, user("1 so far, box 2")]
        cut_off = asyncio.create_task(api.try_turn(session, conversation, **LONG))
        await until(lambda: running_requests(sglang))
        sglang.kill()
        status, body = await cut_off
        assert (status, body["error"]["code"]) == (502, "EngineUnavailableError")

        async def refused() -> None:
            async with asyncio.timeout(15):
                status, body = await api.try_turn(session, conversation, **SHORT)
                assert (status, body["error"]["code"]) == (502, "EngineUnavailableError")
                assert (await api.call("GET", "/health"))[0] == 503

        await refused()
        with pytest.raises(EngineUnavailableError, match=r"not ready after 0\.1 s"):
            await wait_until_ready(engine, 0.1)
        sglang.start()
        await asyncio.sleep(1)
        await refused()
        await wait_until_ready(engine, START_SECONDS)
        await api.turn(session, conversation, **SHORT)
        (row,) = await api.rows(session, index=0)
        spans = [node["completion_span"] for node in (await api.show(session))["tree"]["nodes"]]
    # A server that starts again has the weights that it was started with, and says so.
    assert row.weight_versions == ["2", "default"]
    start = len(row.tokens) - row.response_length
    assert row.rollout_log_probs is not None
    for (begin, end), model in zip(spans, (models.second, models.first), strict=True):
        place = slice(begin - start, end - start)
        (expected,) = transformers.log_probs([row], model)
        np.testing.assert_allclose(row.rollout_log_probs[place], expected[place], rtol=0, atol=1e-4)
