"""What the page of a server is told: bounded, without ids, for whoever has the key."""

import json
from typing import Any

import aiohttp
import pytest
from conversations import assistant, user
from scripted import Api, ScriptedEngine, connected, said, served

from miles_norm import normalize_rewards
from miles_norm.session.server import viewing

pytestmark = pytest.mark.anyio


async def data(api: Api, number: int | None = None) -> dict[str, Any]:
    status, body = await api.call("GET", "/ui/data" if number is None else f"/ui/data/{number}")
    assert status == 200, body
    return dict(body)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "_FRESH_SECONDS", 0)


async def test_thousands_of_sessions_are_counts_and_the_latest() -> None:
    async with served() as api:
        sessions = [await api.create(index=number) for number in range(2000)]
        for number in (3, 700):
            await api.turn(sessions[number], [user("hi")])
        content = json.dumps(await data(api))
        overview = json.loads(content)
        assert (overview["sessions"], overview["turns"], len(overview["running"])) == (2000, 2, viewing.LATEST)
        shown = [session["metadata"] for session in overview["running"]]
        # Those used last, the newest on top; of those never used, the newest.
        assert shown == [f"{{'index': {number}}}" for number in (*range(1999, 1951, -1), 700, 3)]
        assert len(content) < 20_000


async def test_a_large_session_is_cut() -> None:
    async with served(ScriptedEngine(lambda request: said("r" * 10_000))) as api:
        session = await api.create()
        for number in range(viewing.MOST_TURNS + 5):
            await api.turn(session, [user(f"{number} " + "q" * 10_000)])
        await api.turn(session, [user(str(number)) for number in range(50)])
        [brief] = (await data(api))["running"]
        assert brief["turns"] == viewing.MOST_TURNS + 6
        shown = await data(api, brief["number"])
        nodes = shown["tree"]["nodes"]
        assert [node["id"] for node in nodes] == list(range(6, viewing.MOST_TURNS + 6))
        assert nodes[0]["messages"][0]["text"].endswith("q … 10002 characters")
        assert nodes[-1]["left_out"] == 50 - viewing.MOST_MESSAGES
        assert [message["text"] for message in nodes[-1]["messages"]][:-1] == [str(number) for number in range(44, 50)]
        assert len(json.dumps(shown)) < 1_000_000
        assert len(await api.rows(session, picker="keep_all")) == viewing.MOST_TURNS + 6
        shown = await data(api, brief["number"])
        assert len(shown["rows"]) == viewing.MOST_TURNS
        [brief] = (await data(api))["collected"]
        assert brief["num_rows"] == viewing.MOST_TURNS + 6


async def test_collected_sessions_are_remembered_for_a_while() -> None:
    """The latest of them, each once, whether they were deleted or not; the row that speaks is the library's."""
    async with served() as api:
        for number in range(viewing.LATEST + 3):
            session = await api.create()
            await api.turn(session, [user("a")])
            await api.turn(session, [user("b"), assistant("c"), user("d" * number)])
            for reward in (0.0, 1.0):
                rows = await api.rows(session, group_index=0, index=number, agent={"reward": reward})
            await api.call("DELETE", f"/sessions/{session}")
        collected = (await data(api))["collected"]
        assert [entry["asked"]["index"] for entry in collected] == list(range(viewing.LATEST + 2, 2, -1))
        assert collected[0]["speaker"]["place"] == int(normalize_rewards(rows).mainstream_rows[0])
        assert collected[0]["speaker"]["reward"] == 1.0
        assert {entry["num_rows"] for entry in collected} == {2}
        assert (await data(api))["running"] == []
        assert (await data(api, collected[0]["number"]))["rows"][0]["speaks"]


async def test_what_is_gone_is_not_found() -> None:
    async with served() as api:
        session = await api.create()
        [brief] = (await data(api))["running"]
        await api.call("DELETE", f"/sessions/{session}")
        assert (await api.call("GET", f"/ui/data/{brief['number']}"))[0] == 404
        assert (await api.call("GET", "/ui/data/999999999"))[0] == 404
        assert (await data(api))["running"] == []


async def test_ids_which_are_keys_to_sessions_are_told_to_nobody() -> None:
    async with served() as api:
        session = await api.create()
        await api.turn(session, [user("a")])
        await api.rows(session)
        other = await api.create()
        await api.turn(other, [user("a")])
        overview = await data(api)
        told = json.dumps([overview, *[await data(api, one["number"]) for one in overview["running"]]])
        assert session not in told
        assert other not in told
        assert (await api.call("GET", "/ui"))[1].decode().count("session_id") == 0


async def test_data_are_for_whoever_has_the_key() -> None:
    async with served(api_key="right") as api:
        await api.create()
        for key in (None, "wrong"):
            async with connected(api.address, key) as other:
                status, page = await other.call("GET", "/ui")
                assert (status, b"Sessions of miles_norm" in page) == (200, True)
                for path in ("/ui/data", "/ui/data/1", "/ui/", "/ui/data/"):
                    assert (await other.call("GET", path))[0] == 401
        assert (await data(api))["sessions"] == 1


async def test_without_a_key_a_site_whose_name_leads_here_reads_nothing() -> None:
    async with served() as api:
        headers = {"Host": "site.example"}
        status, body = await api.call("GET", "/ui/data", headers=headers)
        assert (status, "under localhost or an address" in body["error"]["message"]) == (403, True)
        port = api.address.rpartition(":")[2]
        for host in (f"localhost:{port}", "127.0.0.1", "[::1]:80"):
            assert (await api.call("GET", "/ui/data", headers={"Host": host}))[0] == 200


async def test_headers_and_a_server_without_a_page() -> None:
    async with served() as api, aiohttp.ClientSession() as http, http.get(f"{api.address}/ui") as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.content_type == "text/html"
    async with served(ui=False) as api:
        session = await api.create()
        await api.turn(session, [user("a")])
        await api.rows(session)
        for path in ("/ui", "/ui/data", "/ui/data/1"):
            assert (await api.call("GET", path))[0] == 404
