"""The launcher of servers on a CPU and the tiny models, where they cannot do what they are for.

The other tests start their servers and make their models with them.
"""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_servers import PYTHON, START_SECONDS, Models


def program(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(PYTHON), "-m", f"sglang_cpu.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)


def serve(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return program("serve", *arguments)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("run", [["--run", "echo served"], []])
def test_a_port_that_is_taken_is_found_before_the_start(models: Models, taken_port: int, run: list[str]) -> None:
    """What listens there would be taken for the server."""
    done = serve(models.first, "--port", taken_port, *run)
    assert done.returncode == 2
    assert f"port {taken_port} cannot be listened at: Address already in use; --port 0 takes a free one" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "65536"], "argument --port: '65536' is no number from 0 to 65535"),
        (["--port", "-1"], "argument --port: '-1' is no number from 0 to 65535"),
        (["--run", " "], "--run: an empty command"),
        (["--run", "echo served", "--log", "/no/where/sglang.log"], "no log in /no/where/sglang.log: No such file"),
    ],
)
def test_options_that_do_not_fit(models: Models, options: list[str], text: str) -> None:
    done = serve(models.first, "--port", 0, *options)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--hidden-size", "24"], "hidden size 24, 2 layers: a multiple of 16, and at least 1, are possible"),
        (["--num-layers", "0"], "hidden size 64, 0 layers"),
    ],
)
def test_sizes_of_no_model(tmp_path: Path, options: list[str], text: str) -> None:
    done = program("tiny_model", tmp_path / "tiny", *options)
    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "tiny").exists()


def test_no_other_model_is_written_over(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 151936}))
    for place, text in ((tmp_path, f"{tmp_path} holds another model"), (config, f"{config} is no folder")):
        done = program("tiny_model", place)
        assert done.returncode == 2
        assert text in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    done = serve(tmp_path, "--run", "echo served")
    assert done.returncode == 2
    assert f"no model in {tmp_path}: python -m sglang_cpu.tiny_model {tmp_path} writes one" in done.stderr
    assert done.stdout == ""


def test_a_server_that_does_not_start_is_told_of_and_no_command_runs(models: Models, tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    done = serve(models.first, "--port", 0, "--log", log, "--run", "echo served", "--no-such-option")
    assert done.returncode == 1
    assert f"the SGLang server ended with status 2; the end of {log}:\n" in done.stderr
    assert "unrecognized arguments: --no-such-option" in done.stderr
    assert "served" not in done.stdout


def test_a_command_ends_as_it_does_in_a_shell(models: Models, tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    done = serve(models.first, "--port", 0, "--log", log, "--run", "echo $SGLANG_URL; kill -TERM $$")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    _, served, address = done.stdout.splitlines()
    assert served.startswith(f"serving on {address} after ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_ended_ends_its_server(models: Models, tmp_path: Path, number: signal.Signals) -> None:
    command = [str(PYTHON), "-m", "sglang_cpu.serve", models.first, "--port", "0", "--log", tmp_path / "sglang.log"]
    launcher = subprocess.Popen(
        [*command, "--run", "echo served"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("starting SGLang on")
    (server,) = wait_for_children(launcher.pid)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=START_SECONDS)
    assert (launcher.returncode, out, err) == (128 + number, "", "")
    wait_until_ended(server)


def wait_until_ended(process: str) -> None:
    """Gone, or dead and not taken leave of yet by the process that inherited it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            state = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"{process} still runs")


def wait_for_children(process: int) -> list[str]:
    children = Path("/proc", str(process), "task", str(process), "children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    return found


def test_a_server_that_is_not_ready_in_time_is_ended(models: Models, tmp_path: Path) -> None:
    done = serve(models.first, "--port", 0, "--log", tmp_path / "sglang.log", "--run", "echo served", "--timeout", 0.5)
    assert done.returncode == 1
    assert "after 0.5 s; the end of" in done.stderr
    assert "served" not in done.stdout
