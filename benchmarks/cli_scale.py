"""How large a dump goes through the command line? Time and peak memory of ``miles-norm normalize`` on a Parquet file.

    python benchmarks/cli_scale.py            10 million rows, some minutes, 1.5 GB of disk
    python benchmarks/cli_scale.py --short    100 thousand rows
    python benchmarks/cli_scale.py --json F   the figures to a file as well

The file is written by pyarrow, as other programs write it: tokens, masks, ids, rewards, in groups of 65,536 rows.
``normalize`` reads it, prints its table of prompt groups, and writes the file again with the advantages. It runs in a
process of its own on a terminal of its own, so that it shows its progress. The baseline is a copy of the bytes of the
file in the same run; the floor of memory is what a process takes that imports the same libraries and reads three rows.
"""

import argparse
import json
import os
import platform
import pty
import re
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

TOKENS, RESPONSE, ROWS_PER_GROUP = 24, 16, 1 << 16
FAN_OUT = {1: 0.36, 2: 0.22, 3: 0.18, 4: 0.13, 5: 0.11}


def write_dump(path: Path, rows: int, seed: int = 0) -> None:
    """Rows of rollouts with the fan-out above, eight rollouts to a prompt group, tokens at random."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    rollouts = max(1, int(rows / 2.41) + 1)
    of_row = np.repeat(np.arange(rollouts), rng.choice(list(FAN_OUT), p=list(FAN_OUT.values()), size=rollouts))
    of_row = np.pad(of_row, (0, max(0, rows - len(of_row))), mode="edge")[:rows]
    reward = rng.integers(0, 5, rollouts + 1) / 4
    writer = None
    for start in range(0, rows, ROWS_PER_GROUP):
        rollout = of_row[start : start + ROWS_PER_GROUP]
        count = len(rollout)
        table = pa.table({
            "group_index": rollout // 8, "rollout_id": rollout, "index": np.arange(start, start + count),
            "reward": reward[rollout], "response_length": np.full(count, RESPONSE),
            "tokens": lists(pa, rng.integers(0, 50_000, count * TOKENS).astype(np.int32), TOKENS),
            "loss_mask": lists(pa, (rng.random(count * RESPONSE) < 0.6).astype(np.int8), RESPONSE),
        })  # fmt: skip
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def lists(pa: Any, flat: np.ndarray[Any, Any], width: int) -> Any:
    return pa.ListArray.from_arrays(np.arange(0, len(flat) + 1, width, dtype=np.int32), flat)


def run(*arguments: object) -> dict[str, Any]:
    """Run the command line on a terminal; seconds, peak memory in bytes, what it showed, and its exit code."""
    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = "100"
        code = "import sys; from miles_norm.cli import main; sys.exit(main(sys.argv[1:]))"
        os.execv(sys.executable, [sys.executable, "-c", code, *map(str, arguments)])
    shown = b""
    while True:
        ready, _, _ = select.select([terminal], [], [], 1.0)
        if not ready:
            continue
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            break
        if not part:
            break
        shown += part
    _, status, usage = os.wait4(pid, 0)
    os.close(terminal)
    return {
        "seconds": time.perf_counter() - start,
        "peak_bytes": usage.ru_maxrss * 1024,
        "shown": shown.decode(errors="replace"),
        "code": os.waitstatus_to_exitcode(status),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="100 thousand rows")
    parser.add_argument("--rows", type=int, help="another number of rows")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = options.rows or (100_000 if options.short else 10_000_000)
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dump(folder / "few.parquet", 3)
        write_dump(folder / "rows.parquet", rows)
        size = (folder / "rows.parquet").stat().st_size
        start = time.perf_counter()
        shutil.copyfile(folder / "rows.parquet", folder / "copy.parquet")
        copied = time.perf_counter() - start
        (folder / "copy.parquet").unlink()
        floor = run("normalize", folder / "few.parquet")
        found = run("normalize", folder / "rows.parquet", "-o", folder / "out.parquet")
        assert floor["code"] == found["code"] == 0, found["shown"][-2000:]
        assert f"{rows} rows" in found["shown"]
        out = (folder / "out.parquet").stat().st_size
    bars = {text: text in found["shown"] for text in ("reading rows.parquet", "writing out.parquet")}
    percents = sorted({int(n) for n in re.findall(r"(\d+)%", found["shown"])})
    figures = {
        "rows": rows,
        "file_bytes": size,
        "out_bytes": out,
        "seconds": found["seconds"],
        "us_per_row": found["seconds"] / rows * 1e6,
        "times_one_copy_of_the_bytes": found["seconds"] / copied,
        "floor_bytes": floor["peak_bytes"],
        "peak_bytes": found["peak_bytes"],
        "peak_bytes_per_row_above_floor": (found["peak_bytes"] - floor["peak_bytes"]) / rows,
        "bars": bars,
    }
    print(f"{rows} rows in a file of {size / 1e6:.0f} MB, {TOKENS} tokens a row")
    print(f"normalize with -o: {figures['seconds']:.1f} s, {figures['us_per_row']:.2f} us a row, ", end="")
    print(f"{figures['times_one_copy_of_the_bytes']:.0f}x a copy of the bytes")
    print(
        f"peak memory {found['peak_bytes'] / 1e6:.0f} MB, of which {floor['peak_bytes'] / 1e6:.0f} MB for three rows: ",
        end="",
    )
    print(f"{figures['peak_bytes_per_row_above_floor']:.0f} bytes a row above that")
    print(f"progress shown: {bars}, {len(percents)} different percentages")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
