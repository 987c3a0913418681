"""What does the session server cost? Turns on an engine that answers at once, against an empty app of the same server.

    python benchmarks/session.py            some two minutes
    python benchmarks/session.py --short    half a minute
    python benchmarks/session.py --json F   the figures to a file as well

Server and load are two processes, and the load is bare asyncio streams, one connection per session. The empty app
reads each request and answers with as many bytes, on the same uvicorn and starlette: what is above it is the work of
sessions. A turn is a request that repeats the whole conversation, of some 1,000 to 2,500 tokens (bytes), and a reply of
64 tokens. Times are those of the client, its own and the kernel's share included; time in the engine is measured and
taken off. Memory is what the server holds more of per session of 5 turns, connections being open already. Set-ups are
taken in turns, best of several rounds. The script fails on any answer but 200 and 201.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import starlette
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from miles_norm.session.completion import Completion
from miles_norm.session.engines.chatml import END_OF_TURN, ChatMLRenderer
from miles_norm.session.engines.protocol import GenerationRequest
from miles_norm.session.server import ServerConfig, running_server

MILES_TURNS_PER_SECOND = 66
"""Measured on a machine of this kind, with an engine that answers at once."""
TURNS, REPLY = 5, 64
SYSTEM = "You are an agent. " * 50
QUESTION = "What comes next? " * 12


class InstantEngine:
    """The same reply to everything, in no time."""

    def __init__(self) -> None:
        self.renderer = ChatMLRenderer()
        text = "x" * (REPLY - 1)
        self._message = {"role": "assistant", "content": text}
        self._token_ids = np.array([*self.renderer.encode(text), END_OF_TURN], np.int32)
        self._log_probs = np.linspace(-3, -0.1, REPLY, dtype=np.float32)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> bool:
        return True

    async def generate(self, request: GenerationRequest) -> Completion:
        return Completion(self._message, self._token_ids, self._log_probs, "stop", weight_version="0")

    async def update_weights(self, path: object, weight_version: str) -> None: ...


def empty_app() -> Starlette:
    """Reads what is sent and answers with as many bytes as a turn."""
    turn = json.dumps({"choices": [{"message": {"content": "x" * 400}}]}).encode()

    async def create(request: Request) -> Response:
        await request.body()
        return Response(b'{"session_id":"0"}', 201, media_type="application/json")

    async def complete(request: Request) -> Response:
        await request.body()
        return Response(turn, media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(b"")

    return Starlette(
        routes=[
            Route("/sessions", create, methods=["POST"]),
            Route("/sessions/{session_id}/v1/chat/completions", complete, methods=["POST"]),
            Route("/metrics", metrics),
        ]
    )


@asynccontextmanager
async def running_empty_app() -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(empty_app(), port=0, access_log=False, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


def serve(pipe: Connection, config: ServerConfig | None) -> None:
    """Body of the server's process: serves until told to end."""

    async def run() -> None:
        running = running_empty_app() if config is None else running_server(InstantEngine(), config)
        async with running as address:
            pipe.send(address)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


class Client:
    """One connection; ``post`` returns the body and takes the time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.times: list[float] = []

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def send(self, method: str, path: str, body: bytes = b"") -> bytes:
        began = time.perf_counter()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status, length = answer.split(b" ", 2)[1], answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        content = await self._reader.readexactly(int(length))
        self.times.append(time.perf_counter() - began)
        if status not in (b"200", b"201"):
            raise RuntimeError(f"{method} {path}: {status.decode()} {content.decode()}")
        return content


async def conversation(client: Client) -> list[float]:
    """One session: the seconds of each of its turns."""
    session = json.loads(await client.send("POST", "/sessions", b"{}"))["session_id"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    client.times.clear()
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn} {QUESTION}"})
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        answer = await client.send("POST", f"/sessions/{session}/v1/chat/completions", body)
        messages.append(json.loads(answer)["choices"][0]["message"] | {"role": "assistant"})
    return client.times


def load(pipe: Connection, port: int) -> None:
    """Body of the load's process: runs sessions on connections, as many as it is asked to, and says the times."""

    async def run(sessions: int, connections: int) -> tuple[list[float], float, float]:
        clients = [Client(port) for _ in range(connections)]
        for client in clients:
            await client.open()
        todo = iter(range(sessions))

        async def worker(client: Client) -> list[float]:
            return [seconds for _ in todo for seconds in await conversation(client)]

        began = time.perf_counter()
        times = await asyncio.gather(*map(worker, clients))
        took = time.perf_counter() - began
        engine = engine_seconds((await clients[0].send("GET", "/metrics")).decode())
        for client in clients:
            await client.close()
        return [seconds for part in times for seconds in part], took, engine

    while (order := pipe.recv()) is not None:
        pipe.send(asyncio.run(run(*order)))


def engine_seconds(metrics: str) -> float:
    """Mean time that a turn has spent in the engine."""
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    count = float(values.get("miles_norm_session_engine_seconds_count", 0))
    return float(values["miles_norm_session_engine_seconds_sum"]) / count if count else 0.0


class Setup:
    """A server process and the process of its load."""

    def __init__(self, config: ServerConfig | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._server_pipe, end = context.Pipe()
        self._server = context.Process(target=serve, args=(end, config), daemon=True)
        self._server.start()
        port = int(self._server_pipe.recv().rsplit(":", 1)[1])
        self._load_pipe, end = context.Pipe()
        self._load = context.Process(target=load, args=(end, port), daemon=True)
        self._load.start()
        self.run(5, 1)  # Imports and caches.

    def run(self, sessions: int, connections: int) -> tuple[list[float], float, float]:
        """Seconds of each turn, of all of them, and of a turn in the engine."""
        self._load_pipe.send((sessions, connections))
        found: tuple[list[float], float, float] = self._load_pipe.recv()
        return found

    def memory(self) -> int:
        """Bytes that the server holds."""
        return int(Path(f"/proc/{self._server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self._load_pipe.send(None)
        self._server_pipe.send(None)
        for process in (self._load, self._server):
            process.join(20)
            process.terminate()


def measure(setup: Setup, alone: int, together: int) -> dict[str, float]:
    times, _, engine = setup.run(alone, 1)
    before = setup.memory()
    many, took, _ = setup.run(together, together)
    assert len(many) == together * TURNS
    return {
        "turn_p50_s": statistics.median(times) - engine,
        "turn_p99_s": sorted(times)[int(0.99 * len(times))] - engine,
        "turn_share_s": took / len(many),
        "bytes_per_session": (setup.memory() - before) / together,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer sessions, half a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    alone, together, rounds = (20, 100, 2) if options.short else (60, 1_000, 3)
    print(f"Python {platform.python_version()}, starlette {starlette.__version__}, uvicorn {uvicorn.__version__}")
    print(f"one client: {alone} sessions in turn; together: {together} sessions at once; {TURNS} turns each")
    print(f"{'':<15} {'one client: p50':>15} {'x':>5} {'p99':>10} {'together':>14} {'x':>5} {'memory a session':>17}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        configs = {"empty app": None, "no journal": ServerConfig(port=0)}
        for sync in ("off", "normal", "full"):
            configs[f"journal {sync}"] = ServerConfig(port=0, journal=f"{folder}/{sync}", journal_sync=sync)
        setups = {name: Setup(config) for name, config in configs.items()}
        for setup in setups.values():
            stack.callback(setup.close)
        best: dict[str, dict[str, float]] = {}
        for _ in range(rounds):
            for name, setup in setups.items():
                found = measure(setup, alone, together)
                best[name] = {key: min(value, best.get(name, found)[key]) for key, value in found.items()}
    floor = best["empty app"]
    for name, found in best.items():
        held = "" if name == "empty app" else f"{found['bytes_per_session'] / 2**10:.1f} KiB"
        ratios = [found[key] / floor[key] for key in ("turn_p50_s", "turn_share_s")]
        print(
            f"{name:<15} {found['turn_p50_s'] * 1e3:>12.2f} ms {ratios[0]:>5.1f} {found['turn_p99_s'] * 1e3:>7.2f} ms "
            f"{1 / found['turn_share_s']:>8.0f} /s   {ratios[1]:>5.1f} {held:>17}"
        )
    slowest = 1 / max(found["turn_share_s"] for found in best.values())
    print(f"{slowest / MILES_TURNS_PER_SECOND:.0f} x the {MILES_TURNS_PER_SECOND} turns/s of Miles' server, or more")
    if options.json:
        options.json.write_text(json.dumps(best, indent=2))


if __name__ == "__main__":
    main()
