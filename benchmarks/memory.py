"""Peak memory of a call, measured on Linux in a process of its own; what the benchmarks share about it."""

import gc
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module returns there."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[Any] = context.Queue()
    process = context.Process(target=_put, args=(queue, function, args))
    process.start()
    value = queue.get(timeout=300)
    process.join()
    return value


def peak_growth(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and by how many bytes memory was larger at its peak than before."""
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to what is resident now
    value = call()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return value, peak - before


def _put(queue: "multiprocessing.Queue[Any]", function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    queue.put(function(*args))
