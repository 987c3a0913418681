"""A bounded local Ray and a simulated cluster of four nodes, each started once; no process may be left behind."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import ray
except ImportError:
    collect_ignore_glob = ["test_*.py"]  # without the extra there is nothing to start

MIB = 2**20
# Hypothesis, the driver and its workers are on few cores; a call of torch is small here.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)
            # Ray leaves sockets and log files to the collector, and speaks of settings of its own.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", name="sessions")
def fixture_sessions() -> Iterator[list[str]]:
    """Folders of the Ray sessions of this run; at the end no process may name one of them."""
    sessions: list[str] = []
    yield sessions
    deadline = time.monotonic() + 30
    while (left := processes_of(sessions)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []


def processes_of(sessions: list[str]) -> list[str]:
    """Command lines of processes that name one of these sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if any(session in words for session in sessions):
                found.append(words)
    return found


@pytest.fixture(scope="module", name="local")
def fixture_local(sessions: list[str]) -> Iterator[None]:
    """Ray on this machine alone."""
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=512 * MIB, log_to_driver=False, configure_logging=False
    )
    sessions.append(session_name())
    yield
    ray.shutdown()


@pytest.fixture(scope="module", name="cluster")
def fixture_cluster(sessions: list[str]) -> Iterator[Any]:
    """A head that runs no task, and four nodes of one CPU each; lost nodes are noticed within seconds."""
    from ray.cluster_utils import Cluster

    noticing = {
        "health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4,
        "memory_monitor_refresh_ms": 0,  # what else runs on this machine is no reason to kill workers
    }  # fmt: skip
    head = {
        "num_cpus": 0, "include_dashboard": False, "object_store_memory": 256 * MIB, "_system_config": noticing,
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(4):
        cluster.add_node(num_cpus=1, object_store_memory=192 * MIB)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    sessions.append(session_name())
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def session_name() -> str:
    return Path(ray._private.worker._global_node.get_session_dir_path()).name
