"""Which HTTP client for an engine that answers at once? Ratios against bare asyncio streams, measured in this run.

    python benchmarks/http_clients.py            some 30 seconds
    python benchmarks/http_clients.py --short    a few seconds
    python benchmarks/http_clients.py --json F   the figures to a file as well

The server is another process that reads a request and writes the same answer whatever it says, so that what is
measured is the client. Requests and answers have the size of a chat turn of 1,000 prompt tokens and 256 sampled ones.
The streams do the least that gives the same bytes: they are a floor, not a client. Clients are taken in turns, best of
several runs.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import httpx

PROMPT, REPLY = 1_000, 256
REQUEST = json.dumps({
    "messages": [{"role": "user", "content": "x" * PROMPT}], "input_ids": list(range(PROMPT)), "logprobs": True,
}).encode()  # fmt: skip
ANSWER = json.dumps({
    "choices": [{"meta_info": {"output_token_logprobs": [[-0.123456789, token, "x"] for token in range(REPLY)]}}],
}).encode()  # fmt: skip
CONCURRENCY = 64

Post = Callable[[bytes], Awaitable[bytes]]
Client = Callable[[int], AbstractAsyncContextManager[Post]]


def serve(pipe: Connection) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode()

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport, self.held = transport, b""

        def data_received(self, data: bytes) -> None:
            self.held += data
            end = self.held.find(b"\r\n\r\n")
            if end >= 0 and len(self.held) >= end + 4 + len(REQUEST):
                self.held = b""
                self.transport.write(head + ANSWER)  # type: ignore[attr-defined]

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@asynccontextmanager
async def use_httpx(port: int) -> AsyncIterator[Post]:
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client:

        async def post(body: bytes) -> bytes:
            return (await client.post(f"http://127.0.0.1:{port}/", content=body)).content

        yield post


@asynccontextmanager
async def use_aiohttp(port: int) -> AsyncIterator[Post]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:

        async def post(body: bytes) -> bytes:
            async with session.post(f"http://127.0.0.1:{port}/", data=body) as answer:
                return await answer.read()

        yield post


@asynccontextmanager
async def use_streams(port: int) -> AsyncIterator[Post]:
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    used = asyncio.Semaphore(CONCURRENCY)

    async def post(body: bytes) -> bytes:
        async with used:
            reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
            head = f"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
            length = int((await reader.readuntil(b"\r\n\r\n")).lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = await reader.readexactly(length)
            idle.append((reader, writer))
            return answer

    yield post
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()


CLIENTS: dict[str, Client] = {"streams": use_streams, "aiohttp": use_aiohttp, "httpx": use_httpx}


async def measure(client: Client, port: int, calls: int) -> tuple[float, float, float]:
    """Seconds: a call at one caller (median), a call's share of the time at many, processor time of one of those."""
    async with client(port) as post:
        assert await post(REQUEST) == ANSWER
        alone = []
        for _ in range(calls):
            start = time.perf_counter()
            await post(REQUEST)
            alone.append(time.perf_counter() - start)

        async def caller() -> None:
            for _ in range(calls // CONCURRENCY + 1):
                await post(REQUEST)

        total = CONCURRENCY * (calls // CONCURRENCY + 1)
        start, busy = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))
        together = (time.perf_counter() - start) / total
        return sorted(alone)[len(alone) // 2], together, (time.process_time() - busy) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer calls, a few seconds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    calls, rounds = (200, 3) if options.short else (1_000, 7)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    port = here.recv()
    best: dict[str, tuple[float, ...]] = {}
    for _ in range(rounds):
        for name, client in CLIENTS.items():
            found = asyncio.run(measure(client, port, calls))
            best[name] = tuple(map(min, best.get(name, found), found))
    server.terminate()
    server.join()
    print(f"Python {platform.python_version()}, aiohttp {aiohttp.__version__}, httpx {httpx.__version__}")
    print(f"requests of {len(REQUEST):,} bytes, answers of {len(ANSWER):,}")
    print(f"{'':<8} {'1 caller':>12} {'x':>5} {f'{CONCURRENCY} callers':>14} {'x':>5} {'processor':>12} {'x':>5}")
    floor = best["streams"]
    for name, (alone, together, busy) in best.items():
        ratios = [value / base for value, base in zip(best[name], floor, strict=True)]
        print(
            f"{name:<8} {alone * 1e6:>9.0f} us {ratios[0]:>5.1f} {1 / together:>8.0f} /s   {ratios[1]:>5.1f} "
            f"{busy * 1e6:>9.0f} us {ratios[2]:>5.1f}"
        )
    if options.json:
        names = ("call_s", "share_s", "processor_s")
        figures = {name: dict(zip(names, values, strict=True)) for name, values in best.items()}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
