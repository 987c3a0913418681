"""One SGLang server for all tests here, which are skipped where none is installed; async tests run on asyncio."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_servers import (
    ARCHITECTURE,
    PYTHON,
    START_SECONDS,
    Models,
    Server,
    Transformers,
    running,
    script,
    sglang_server,
)

collect_ignore = ["make_models.py", "recompute.py"]  # programs for the environment of the server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if PYTHON is None:
                item.add_marker(pytest.mark.skip(reason="make test-sglang installs SGLang, and names it SGLANG_PYTHON"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    made = Models(folder / "first", folder / "second")
    command, environment = script("make_models.py", ARCHITECTURE, made.first, made.second)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="session")
def transformers() -> Iterator[Transformers]:
    oracle = Transformers()
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def sglang(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(sglang_server(models.first, tmp_path_factory.mktemp("server") / "sglang.log")) as server:
        yield server
