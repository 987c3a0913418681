"""New weights while rollouts are under way on a real SGLang server."""

import asyncio

import numpy as np
import pytest
from conversations import user
from scripted import served, until
from sglang_servers import Models, Server, Transformers, begun_session, client, post, running_requests, sampled

from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.engines.sglang import SGLangEngine

pytestmark = pytest.mark.anyio


async def test_rows_carry_the_version_of_each_turn_and_its_log_probs(
    sglang: Server, models: Models, transformers: Transformers
) -> None:
    engine = SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))
    async with served(engine) as api:
        await engine.update_weights(models.first, "1")
        settings = {"stop": ["e", "\n"], "max_tokens": 100}
        session, begun = await begun_session(api, "0 so far, box 4", **settings)
        await engine.update_weights(models.second, "2")
        for number in (5, 6):
            await api.turn(session, [*begun, user(f"1 so far, box {number}")], **settings)
        await engine.update_weights(models.first, "3")
        await api.turn(session, begun[:1], **settings)
        rows = await api.rows(session, index=0, picker="keep_all")
        spans = [node["completion_span"] for node in (await api.show(session))["tree"]["nodes"]]
    assert [row.weight_versions for row in rows] == [["1", "2"], ["1", "2"], ["3"]]
    by_version = {
        "1": transformers.log_probs(rows, models.first),
        "2": transformers.log_probs(rows, models.second),
    }
    by_version["3"] = by_version["1"]
    for number, row in enumerate(rows):
        start = len(row.tokens) - row.response_length
        assert row.rollout_log_probs is not None
        for turn, version in zip(row.metadata["leaf"]["path_node_ids"], row.weight_versions, strict=True):
            place = slice(spans[turn][0] - start, spans[turn][1] - start)
            assert sampled(row)[place].all()
            values = {name: by_version[name][number][place] for name in ("1", "2")}
            right, wrong = values[version.replace("3", "1")], values["1" if version == "2" else "2"]
            np.testing.assert_allclose(row.rollout_log_probs[place], right, rtol=0, atol=1e-4)
            assert np.abs(row.rollout_log_probs[place] - wrong).max() > 1e-3


async def test_a_generation_that_runs_finishes_under_the_weights_that_it_began_with(
    sglang: Server, models: Models, transformers: Transformers
) -> None:
    engine = SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))
    async with served(engine) as api:
        await engine.update_weights(models.first, "old")
        session = await api.create()
        long = {"max_tokens": 300, "ignore_eos": True}
        turn = asyncio.create_task(api.turn(session, [user("0 so far, box 1")], **long))
        await until(lambda: running_requests(sglang))
        await engine.update_weights(models.second, "new")
        await turn
        await api.turn(session, [user("0 so far, box 2")], max_tokens=40)
        rows = {row.weight_versions[0]: row for row in await api.rows(session, index=0)}
    assert rows.keys() == {"old", "new"}
    for version, model in (("old", models.first), ("new", models.second)):
        (expected,) = transformers.log_probs([rows[version]], model)
        np.testing.assert_allclose(rows[version].rollout_log_probs, expected, rtol=0, atol=1e-4)


async def test_an_update_while_requests_begin_and_end(sglang: Server, models: Models) -> None:
    """Health checks and clients that leave keep no update from being finished, and no version from being told."""
    engine = SGLangEngine(sglang.url, HuggingFaceRenderer(models.first))
    async with served(engine) as api:
        session = await api.create()
        for number in range(10):
            checks = [asyncio.create_task(engine.health()) for _ in range(3)]
            leaver = asyncio.create_task(api.turn(session, [user("leaves")], max_tokens=200, ignore_eos=True))
            await asyncio.sleep(0.05 * (number % 4))
            leaver.cancel()
            await engine.update_weights(models.first, str(number))
            await api.turn(session, [user("stays")], max_tokens=5)
            await asyncio.gather(*checks)
        rows = await api.rows(session, index=0, picker="keep_all")
    assert sorted(row.weight_versions[0] for row in rows if row.response_length <= 5) == [str(n) for n in range(10)]


async def test_versions_are_the_server_s_own(sglang: Server, models: Models) -> None:
    async with client(sglang, models.first) as engine:
        await engine.update_weights(models.first, "7")
    answer = await post(sglang, "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "7"
