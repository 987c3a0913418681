"""The page of a running server: sessions appear, grow and are collected while it is open."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from conversations import assistant, user
from page_checks import HOSTILE, OUTSIDE, SMALL
from scripted import Api, Gate, ScriptedEngine, said, served

from miles_norm import normalize_rewards

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


class Live:
    """A server in a thread of its own, since the browser takes the main one."""

    def __init__(self, engine: ScriptedEngine, settings: dict[str, Any]) -> None:
        self.engine = engine
        self._loop, self._ready, self._end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(settings),))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self, settings: dict[str, Any]) -> None:
        async with served(self.engine, **settings) as self.api:
            self._ready.set()
            await self._end.wait()

    @property
    def page(self) -> str:
        return f"{self.api.address}/ui"

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


Serve = Callable[..., Live]


@pytest.fixture(name="serve")
def fixture_serve() -> Iterator[Serve]:
    started: list[Live] = []

    def serve(engine: ScriptedEngine | None = None, **settings: Any) -> Live:
        started.append(Live(engine or ScriptedEngine(), settings))
        return started[-1]

    yield serve
    for live in started:
        live.end()


async def branching(api: Api, **metadata: Any) -> str:
    """A session with a turn, two replies to what follows it, and a conversation of its own."""
    session = await api.create(**metadata)
    await api.turn(session, [user("first")])
    for text in ("second", "a longer second"):
        await api.turn(session, [user("first"), assistant("ok 0"), user(text)])
    await api.turn(session, [user("a sub-agent")])
    return session


def test_a_session_from_its_first_turn_to_its_rows(open_page: Open, serve: Serve) -> None:
    live = serve()
    page = open_page(live.page)
    assert page.title() == "Sessions of miles_norm"
    page.get_by_text("None.", exact=True).wait_for()
    session = live.do(branching(live.api, index=3))
    card = page.locator("#running .session")
    card.get_by_text("4 turns").wait_for()
    assert "{'index': 3}" in card.inner_text()
    assert "1 session, 4 turns in those not collected" in page.locator("#state").inner_text()
    card.locator("summary").first.click()
    card.locator(".tree").wait_for()
    assert card.locator(".turns").all_inner_texts() == ["turn 0", "turn 1", "turn 2", "turn 3"]
    assert card.locator(".card").count() == 3
    leaf = card.locator('.card[data-node="2"]')
    leaf.get_by_text("conversation of 2 turns").click()
    leaf.locator("pre").last.wait_for()  # made once the details are open
    assert leaf.locator("pre").all_inner_texts() == ["first", "ok 0", "a longer second", "ok 2"]
    # It grows under the eyes of who reads it, and what was opened stays open.
    live.do(
        live.api.turn(
            session, [user("first"), assistant("ok 0"), user("a longer second"), assistant("ok 2"), user("x")]
        )
    )
    card.get_by_text("turns 2 → 4").wait_for()
    assert card.get_attribute("open") is not None
    # Collected and forgotten, it says which row speaks: what normalize_rewards says, too.
    asked = {"group_index": 0, "index": 3, "picker": "keep_all", "agent": {"reward": 0.5}}
    rows = live.do(live.api.rows(session, **asked))
    live.do(live.api.call("DELETE", f"/sessions/{session}"))
    speaker = int(normalize_rewards(rows).mainstream_rows[0])
    card = page.locator("#collected .session")
    tokens = int(rows[speaker].loss_mask.sum())
    card.get_by_text(f"row {speaker} of 3 speaks with {tokens} trainable tokens, reward 0.5000").wait_for()
    assert "group 0, rollout 3" in card.inner_text()
    assert page.locator("#running .session").count() == 0
    card.locator(".badge.speaks").wait_for()
    assert card.locator(".card:has(.badge.speaks) strong").inner_text().strip() == f"row {speaker}"
    assert page.locator("#collected .card strong").count() == 3


def test_turns_under_way_and_leaves_without_a_row(open_page: Open, serve: Serve) -> None:
    gate = Gate()
    live = serve(ScriptedEngine(lambda request: gate(request) if "wait" in str(request.messages) else said("ok 0")))
    session = live.do(branching(live.api))
    waiting = asyncio.run_coroutine_threadsafe(live.api.turn(session, [user("wait")]), live._loop)
    page = open_page(live.page)
    page.locator("#running").get_by_text("1 under way").wait_for()
    live._loop.call_soon_threadsafe(gate.open)
    waiting.result(60)
    page.locator("#running").get_by_text("5 turns").wait_for()
    assert page.get_by_text("under way", exact=True).count() == 0
    live.do(live.api.rows(session, picker="drop_retries"))
    card = page.locator("#collected .session")
    card.wait_for()
    card.locator("summary").first.click()
    card.locator('.card[data-node="1"]').get_by_text("no row: a later retry took its place").wait_for()


def test_hostile_text_is_shown_as_text(open_page: Open, serve: Serve) -> None:
    live = serve(ScriptedEngine(lambda request: said(HOSTILE)))
    session = live.do(live.api.create(name=HOSTILE))
    live.do(live.api.turn(session, [user(HOSTILE)], tools=[]))
    page = open_page(live.page)
    card = page.locator(".session")
    card.locator("summary").first.click()
    card.get_by_text("conversation of 1 turn").click()
    card.locator("pre").last.wait_for()
    assert card.locator("pre").all_inner_texts() == [HOSTILE] * 2
    assert "'</script><im" in card.locator("summary").first.inner_text()
    live.do(live.api.rows(session, group_index=HOSTILE, rollout_id=HOSTILE, agent={"reward": {HOSTILE: 1.0}}))
    page.locator("#collected .session").wait_for()
    assert f"group {HOSTILE}, rollout {HOSTILE}" in page.locator("main").inner_text()
    assert page.locator("main img, main b, main script").count() == 0


def test_a_server_with_a_key(open_page: Open, serve: Serve) -> None:
    live = serve(api_key="the key")
    live.do(live.api.create())
    page = open_page(live.page, logged="401")
    page.get_by_text("This server asks for its key.").wait_for()
    page.locator("#key").fill("another")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("The server has another key.").wait_for()
    page.locator("#key").fill("the key")
    page.get_by_role("button", name="Show", exact=True).click()
    page.locator("#running .session").wait_for()
    assert page.locator("#key-form").is_hidden()
    page.reload()
    page.locator("#running .session").wait_for()
    linked = open_page(f"{live.page}#key=the%20key")
    linked.locator("#running .session").wait_for()
    assert linked.url == live.page


def test_a_server_that_is_gone_for_a_while_says_so(open_page: Open, serve: Serve) -> None:
    live = serve()
    page = open_page(live.page, logged="ERR_")
    page.get_by_text("0 sessions").wait_for()
    live.do(live.api.create())
    page.route("**/ui/data", lambda route: route.abort())
    page.get_by_text("No answer").wait_for()
    page.unroute("**/ui/data")
    page.get_by_text("1 session, 0 turns").wait_for()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone(open_page: Open, serve: Serve, dark: bool) -> None:
    """At 400 pixels nothing is cut off and no text is small, whatever was said."""
    live = serve(ScriptedEngine(lambda request: said("x" * 3000)))
    for number in range(3):
        session = live.do(live.api.create(index=number, task="a name without a break " + "y" * 300))
        live.do(live.api.turn(session, [user("z" * 500), assistant("a"), user("b")]))
        if number:
            live.do(live.api.rows(session, index=number, agent={"reward": 1.0}))
    page = open_page(live.page, phone=True, dark=dark)
    for place in ("#running", "#collected"):
        page.locator(f"{place} .session summary").first.click()
        page.locator(f"{place} .card summary").first.click()
    page.locator("#collected pre").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(SMALL) == []
    assert "… 3000 characters" in page.locator("main").inner_text()
