"""Start an SGLang server on the CPU, alone or for as long as a command runs.

    python -m sglang_cpu.serve tiny --port 30000
    python -m sglang_cpu.serve tiny --run 'curl -s $SGLANG_URL/v1/models'

Options that this launcher does not know are handed to ``sglang.launch_server``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["ENVIRONMENT", "launch_command", "main", "wait_until_ready"]

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    # More threads cost tiny models more than they give; torch would start one per core in each of three processes.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What the server needs in its environment, where nothing else is set there."""

_OPTIONS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
    "--mem-fraction-static": "0.1",
    "--max-total-tokens": "32768",
    "--tool-call-parser": "qwen",
}
_FLAGS = ("--sleep-on-idle",)  # Without it a server that waits for requests keeps one core busy.


def launch_command(model: str | os.PathLike[str], port: int, options: Sequence[str] = ()) -> list[str]:
    """Command line of the server; of options that are given twice SGLang takes the last."""
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", os.fspath(model)]
    defaults = [text for option in _OPTIONS.items() for text in option]
    return [*server, "--host", "127.0.0.1", "--port", str(port), *defaults, *_FLAGS, *options]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for the first answer.

    Raises:
        ChildProcessError: the server ended.
        TimeoutError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no SGLang server at {url} after {timeout_s:g} s")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError:  # Not listening yet, or status 503: loading.
            time.sleep(0.5)
    raise ChildProcessError(f"the SGLang server ended with status {process.returncode}")


def _run(command: str, model: Path, port: int, options: Sequence[str], log: Path, timeout_s: float) -> int:
    """Serve while a command runs; its exit status, and as a shell has it 128 and the signal that ended it."""
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    try:
        log.unlink(missing_ok=True)  # What is left of an earlier server may still write to the old one.
        output = log.open("wb")
    except OSError as error:
        print(f"no log in {log}: {error.strerror}", file=sys.stderr)
        return 2
    with output:
        print(f"starting SGLang on {model}, log in {log}", flush=True)
        process = subprocess.Popen(
            launch_command(model, port, options),
            env=_environment(),
            stdout=output,
            stderr=output,
            preexec_fn=_end_with_parent,
        )
    try:
        wait_until_ready(url, process, timeout_s)
        print(f"serving on {url} after {time.monotonic() - began:.0f} s", flush=True)
        ended = subprocess.run(["sh", "-c", command], env={**os.environ, "SGLANG_URL": url}, check=False).returncode
        return ended if ended >= 0 else 128 - ended
    except (ChildProcessError, TimeoutError) as error:
        print(f"{error}; the end of {log}:\n{_tail(log)}", file=sys.stderr)
        return 1
    finally:
        process.kill()  # Its children end with it; told to end, it would take 5 seconds for the same.
        process.wait()


def _end_with_parent() -> None:
    """In a child: be killed when the launcher is, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _environment() -> Mapping[str, str]:
    return ENVIRONMENT | os.environ


def _usable_port(port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        OSError: something listens there. A server would find out at the end of its start, and until then the other one
            would be taken for it.
    """
    with socket.create_server(("127.0.0.1", port)) as listener:
        found: int = listener.getsockname()[1]
        return found


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 65535")
    return int(text)


def _interrupted(number: int, frame: object) -> NoReturn:
    """End by way of every ``finally``: the command and the server end too."""
    sys.exit(128 + number)


def main() -> None:
    """Command line."""
    # Options that begin as one of these do are SGLang's.
    parser = argparse.ArgumentParser(
        prog="python -m sglang_cpu.serve", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="folder of a model, before any option of SGLang")
    parser.add_argument("--port", type=_port, default=30000, help="0 takes a free one")
    parser.add_argument("--run", metavar="COMMAND", help="serve while this command runs; it finds SGLANG_URL set")
    parser.add_argument(
        "--log", type=Path, default=Path("sglang.log"), help="with --run: where the server's output goes"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, help="with --run: seconds that the server may take to start"
    )
    options, others = parser.parse_known_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"no model in {options.model}: python -m sglang_cpu.tiny_model {options.model} writes one")
    if options.run is not None and not options.run.strip():
        parser.error("--run: an empty command")
    try:
        port = _usable_port(options.port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # Its own text repeats the address.
        parser.error(f"port {options.port} cannot be listened at: {reason}; --port 0 takes a free one")
    if options.run:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupted)
        sys.exit(_run(options.run, options.model, port, others, options.log, options.timeout))
    print(f"SGLang on http://127.0.0.1:{port}, in half a minute or so; Ctrl-C ends it", flush=True)
    command = launch_command(options.model, port, others)
    os.execve(command[0], command, dict(_environment()))


if __name__ == "__main__":
    main()
