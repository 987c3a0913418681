"""The commands that look at what normalization does: ``audit`` and ``diff``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from miles_norm.cli.inputs import read_config
from miles_norm.cli.options import Config, Json, Settings, Sizes
from miles_norm.cli.output import check_output
from miles_norm.cli.terminal import console_for, exit_codes, show_lines, show_warnings
from miles_norm.cli.usage import FLAG
from miles_norm.pages import strict_json
from miles_norm.storage.atomic import REPORT_ENDINGS

__all__ = ["audit", "diff"]


@exit_codes()
def audit(
    dumps: Annotated[
        list[Path], typer.Argument(metavar="DUMP", help="Rollout dumps of a run, as for normalize: one per step.")
    ],
    baseline: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Compare with: rows (each row counts as a rollout), miles-2369, miles-2498, slime, agent-lightning or "
            "verl.",
        ),
    ] = "rows",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write a report that a browser opens: .html.")
    ] = None,
    config: Config = None,
    settings: Settings = None,
    prompt_group_sizes: Sizes = None,
    force: Annotated[bool, typer.Option("--force", metavar=FLAG, help="Let --output replace a file.")] = False,
    as_json: Json = False,
) -> None:
    """Look at the dumps of a run: what is wrong with them, and what counting rows instead of rollouts would change."""
    if output is not None:
        check_output(output, dumps[0], REPORT_ENDINGS, force=force)

    from miles_norm.cli.audit import audit_json, print_audit, run_audit

    found, warnings = run_audit(dumps, read_config(config, settings or ()), prompt_group_sizes, baseline)
    if output is not None:
        from miles_norm.audit import write_report

        write_report(found, output)
    if as_json:
        sys.stdout.write(strict_json(audit_json(found, warnings)) + "\n")
    else:
        print_audit(console_for(), found)
        sys.stdout.flush()
        show_warnings(console_for(stderr=True), warnings)
    if output is not None:
        show_lines(console_for(stderr=True), f"{output}: open it in a browser", head="wrote ", style="green")


@exit_codes()
def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A config (.yaml), the name of a baseline such as slime, or a dump: with the advantages that "
            "normalize -o wrote into it, else with those of --config.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with, likewise.")],
    dump: Annotated[
        Path | None, typer.Option(metavar="DUMP", help="The dump on which configs and baselines are compared.")
    ] = None,
    config: Config = None,
    settings: Settings = None,
    prompt_group_sizes: Sizes = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="What counts as no change, relative above 1.")
    ] = 1e-6,
    show_all: Annotated[
        bool, typer.Option("--all", metavar=FLAG, help="Show every rollout that changes, not the 40 most changed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two configs, baselines or versions on the same rows; the exit code is 1 if an advantage changes."""
    from miles_norm.cli.diff import Inputs, compare, diff_json, print_diff

    comparison = compare(a, b, Inputs(dump, config, settings or (), prompt_group_sizes, tolerance))
    if as_json:
        sys.stdout.write(strict_json(diff_json(comparison)) + "\n")
    else:
        print_diff(console_for(), comparison, show_all=show_all)
        sys.stdout.flush()
        show_warnings(console_for(stderr=True), comparison.warnings)
    if comparison.difference:
        raise typer.Exit(1)
