"""A scripted SGLang server as a process: python engine_process.py PORT SECONDS.

Sampling takes so many seconds. It prints its address, and a line for each request that has arrived.
"""

import asyncio
import sys
from dataclasses import dataclass

from aiohttp import web
from fake_sglang import FakeSGLang, serving


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass
class Announcing(FakeSGLang):
    async def chat(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        say("request")
        return await super().chat(request)


async def main(port: int, seconds: float) -> None:
    async with serving(Announcing(seconds=seconds), port) as server:
        say(server.url)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
