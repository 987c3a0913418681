"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_norm.cli.usage import FLAG

__all__ = ["Config", "Dump", "Json", "Settings", "Sizes"]

Dump = Annotated[
    Path,
    typer.Argument(
        metavar="DUMP",
        help="Rollout dump: Miles or slime .pt, .jsonl (.gz, .zst), .parquet, .safetensors. A row needs reward, "
        "group_index, rollout_id or index, and loss_mask or response_length: see docs/semantics.md.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with settings, as miles-norm config prints them."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting, over those of --config, such as std_ddof=0 or options.whitening=rollout; may be repeated. "
        "miles-norm config prints all of them.",
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Rows of each prompt group, such as 8,6,5,6; by default those that the dump's metadata records, "
        "which 'none' ignores.",
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print one JSON object instead of text.")]
