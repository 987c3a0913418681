"""The launcher of servers on a CPU, where it cannot do what it is for; the other tests start their servers with it."""

import subprocess
from pathlib import Path

from sglang_servers import PYTHON, START_SECONDS, Models


def serve(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(PYTHON), "-m", "sglang_cpu.serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)


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


def test_a_server_that_is_not_ready_in_time_is_ended(models: Models, tmp_path: Path) -> None:
    done = serve(models.first, "--port", 0, "--log", tmp_path / "sglang.log", "--run", "echo served", "--timeout", 0.5)
    assert done.returncode == 1
    assert "after 0.5 s; the end of" in done.stderr
    assert "served" not in done.stdout
