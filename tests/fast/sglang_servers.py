"""Real SGLang servers and routers as processes, and the model that they serve."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from conversations import user
from numpy.typing import NDArray
from scripted import Api

from miles_norm.samples import Sample
from miles_norm.session.engines.hugging_face import HuggingFaceRenderer
from miles_norm.session.engines.sglang import SGLangEngine

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SGLANG_PYTHON")
"""Interpreter of the environment in which SGLang and routers are installed."""
ARCHITECTURE = os.environ.get("SGLANG_ARCHITECTURE", "qwen2")
START_SECONDS = 600
"""What a server may take to start: twenty seconds on a quiet machine, of which nearly all is importing."""


@dataclass(frozen=True)
class Models:
    """Two versions of the weights of one tiny model."""

    first: Path
    second: Path


class Server:
    """A process that answers on a port of 127.0.0.1 some time after it was started."""

    def __init__(self, command: Callable[[int], Sequence[object]], log: Path, ready: str) -> None:
        self._command, self._log, self._ready = command, log, ready
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, on the same port as before, and return at once."""
        command = [str(part) for part in self._command(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    def wait(self) -> None:
        """Wait until it serves."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"{self._process.args} ended with {self._process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(self.url + self._ready, timeout=10) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"{self._process.args} does not serve after {START_SECONDS} s:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL, as the kernel does when memory runs out; SGLang's other processes end with the one that is hit."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def served(self, path: str) -> int:
        """Requests to a path that its log tells of."""
        return self._log.read_text(errors="replace").count(f"{path} HTTP")


def sglang_server(model: Path, log: Path, name: str = "tiny") -> Server:
    def command(port: int) -> list[object]:
        return [PYTHON, "-m", "sglang_cpu.serve", model, "--port", port, "--served-model-name", name]

    return Server(command, log, "/health")


def router(module: str, workers: Sequence[Server], log: Path, *options: str) -> Server:
    """``smg`` or ``sglang_router`` before servers."""
    urls = [worker.url for worker in workers]

    def command(port: int) -> list[object]:
        start = [PYTHON, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", port]
        return [*start, "--prometheus-port", free_port(), "--worker-urls", *urls, *options]

    return Server(command, log, "/readiness")


@contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def end_with_parent() -> None:
    """In a child: be killed when the tests are, however they end."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def client(server: Server, model: Path, **settings: Any) -> AsyncIterator[SGLangEngine]:
    """Our client of a server, outside of any session server."""
    engine = SGLangEngine(server.url, HuggingFaceRenderer(model), **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def post(server: Server, path: str, body: Any = None) -> Any:
    """What the server itself answers, with status 200."""
    async with aiohttp.ClientSession() as http, http.post(server.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def flush_cache(server: Server) -> None:
    """Forget all prefixes; the scheduler may still be ending the last request, so that it waits."""
    await post(server, "/flush_cache?timeout=30")


async def running_requests(server: Server) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/v1/loads") as answer:
        return sum(load["num_running_reqs"] for load in (await answer.json())["loads"])


async def known_workers(smg: Server) -> int:
    """Workers that smg sends requests to: it is ready with the first of them, and takes in one after another."""
    async with aiohttp.ClientSession() as http, http.get(f"{smg.url}/workers") as answer:
        total: int = (await answer.json())["total"]
        return total


async def begun_session(api: Api, question: str, **settings: Any) -> tuple[str, list[Any]]:
    """A session with one turn, and its messages; a reply that is cut off cannot be continued, and is left behind."""
    while True:
        session = await api.create()
        choice = (await api.turn(session, [user(question)], **settings))["choices"][0]
        if choice["finish_reason"] != "length":
            return session, [user(question), choice["message"]]


def script(name: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a program of tests/sglang, which runs where SGLang is installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return [str(PYTHON), str(ROOT / "tests" / "sglang" / name), *map(str, arguments)], environment


def sampled(row: Sample) -> NDArray[np.bool_]:
    """Tokens of the response that a model sampled, those that another row owns too: they have a log-prob."""
    assert row.rollout_log_probs is not None
    return np.asarray(row.rollout_log_probs) != 0


class Transformers:
    """Computes log-probs of rows as transformers does, in a process of its own."""

    def __init__(self) -> None:
        command, environment = script("recompute.py")
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def log_probs(self, rows: Sequence[Sample], model: Path, temperature: float = 1.0) -> list[NDArray[np.float32]]:
        """Of the response of each row, from the whole row at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        tokens = [np.asarray(row.tokens).tolist() for row in rows]
        job = {"model": str(model), "rows": tokens, "temperature": temperature}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return [
            np.array(values[len(values) - row.response_length :], np.float32)
            for row, values in zip(rows, found, strict=True)
        ]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)
