"""``miles-norm rollout`` as a process, with an agent that does what it should not; its arguments are the command's."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp


async def _turn(base_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with aiohttp.ClientSession() as http, http.post(f"{base_url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200


async def agent(*, base_url: str, prompt: str, metadata: dict[str, Any], **_: Any) -> dict[str, Any]:
    """A turn, then what the prompt says; a prompt that is no fault is rewarded at once."""
    await _turn(base_url)
    Path(os.environ["MARKS"], f"{prompt}-{base_url[-6:]}").touch()
    await FAULTS.get(prompt, _nothing)()
    return {"reward": 1.0}


async def _nothing() -> None: ...


async def _once() -> None:
    """Only the first of its rollouts ends."""
    if len(list(Path(os.environ["MARKS"]).glob("once-*"))) > 1:
        await _waits()


async def _waits() -> None:
    await asyncio.Event().wait()


async def _swallows() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def _swallows_all() -> None:
    """In a task of its own, which not even GeneratorExit ends."""

    async def on_and_on() -> None:
        while True:
            try:
                await asyncio.sleep(0.01)
            except BaseException:  # noqa: BLE001
                continue

    await asyncio.shield(asyncio.create_task(on_and_on()))


async def _thread() -> None:
    await asyncio.to_thread(time.sleep, 3600)


async def _own_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,)).start()


async def _blocks() -> None:
    time.sleep(3600)


async def _exits() -> None:
    sys.exit("usage")


async def _interrupts() -> None:
    raise KeyboardInterrupt


async def _task_exits() -> None:
    await asyncio.gather(asyncio.create_task(_exits()), asyncio.sleep(0.1))


async def _task_interrupts() -> None:
    await asyncio.gather(asyncio.create_task(_interrupts()), asyncio.sleep(0.1))


async def _stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


FAULTS = {
    "waits": _waits, "once": _once, "swallows": _swallows,
    "swallows all": _swallows_all, "thread": _thread, "own thread": _own_thread,
    "blocks": _blocks, "exits": _exits, "interrupts": _interrupts, "task exits": _task_exits,
    "task interrupts": _task_interrupts, "stops the loop": _stops_the_loop,
}  # fmt: skip

if __name__ == "__main__":
    from miles_norm.cli import main, rolling
    from miles_norm.session import rollout

    # Shorter than in earnest.
    rollout._GRACE_SECONDS = 0.2
    rolling._END_SECONDS, rolling._BLOCKED_SECONDS = 4.0, 1.0
    sys.modules["miles_norm.cli"]._EXIT_SECONDS = 1.0
    sys.exit(main())
