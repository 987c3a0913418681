"""The commands and their options. Whatever needs torch is imported inside a command, so that help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import miles_norm
from miles_norm.cli.audit_commands import audit, diff
from miles_norm.cli.inputs import ADDED_KEYS, kept_warnings, load, read_config, read_settings
from miles_norm.cli.options import Config, Dump, Json, Settings, Sizes
from miles_norm.cli.output import check_output, write_output
from miles_norm.cli.terminal import console_for, exit_codes, show_lines, show_warnings
from miles_norm.cli.usage import FLAG, Command, Group
from miles_norm.errors import ConfigError
from miles_norm.pages import strict_json
from miles_norm.storage.atomic import DUMP_ENDINGS, TRAIN_ENDINGS, is_there

__all__ = ["app"]

app = typer.Typer(
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: miles-norm normalize rollout_0.pt --set advantage_estimator=rloo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"miles-norm {miles_norm.__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar=FLAG, is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Turn the rewards of a rollout dump into advantages that count each rollout once, and explain every number."""


@app.command(
    cls=Command, epilog="Example: miles-norm normalize rollout_0.pt --config configs/grpo.yaml -o advantages.jsonl"
)
@exit_codes()
def normalize(  # the command line is what the options are
    dump: Dump,
    config: Config = None,
    settings: Settings = None,
    prompt_group_sizes: Sizes = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Write the rows with advantage, trained and rollout_reward added: .jsonl (.gz, .zst), .parquet, .pt, "
            ".safetensors.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", metavar=FLAG, help="Let --output replace a file, and keys of its rows.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", metavar=FLAG, help="Show every prompt group, not the 40 most notable.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute the advantage of every rollout and show a table of the prompt groups."""
    if output is not None:
        check_output(output, dump, DUMP_ENDINGS, force=force)
    batch = load(dump, read_config(config, settings or ()), prompt_group_sizes)

    from miles_norm.cli.report import print_report, report_json

    if as_json:
        report = strict_json(report_json(batch)) + "\n"
    else:
        console = console_for()
        with console.capture() as captured:
            print_report(console, batch, show_all=show_all)
        report = captured.get()
    # The file is written once nothing but a closed pipe can stop the report, and the report printed once it is there.
    about_output = [] if output is None else write_output(batch, output, force=force)
    sys.stdout.write(report)
    if output is not None:
        sys.stdout.flush()
        messages = console_for(stderr=True)
        show_warnings(messages, about_output)
        written = f"{output}: {batch.result.index.num_rows} rows, each with {', '.join(ADDED_KEYS)}"
        show_lines(messages, written, head="wrote ", style="green")


@app.command(cls=Command, epilog="Example: miles-norm explain rollout_0.pt --row 12")
@exit_codes()
def explain(
    dump: Dump,
    row: Annotated[int | None, typer.Option(metavar="K", help="Number of a row, from 0.")] = None,
    rollout: Annotated[
        str | None, typer.Option(metavar="ID", help="Id of a rollout; with adapters also ADAPTER/ID.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="ID", help="Id of a prompt group; with adapters also ADAPTER/ID.")
    ] = None,
    config: Config = None,
    settings: Settings = None,
    prompt_group_sizes: Sizes = None,
    as_json: Json = False,
) -> None:
    """Say why a row, a rollout or a prompt group got its advantages."""
    _check_selectors(row, rollout, group)
    batch = load(dump, read_config(config, settings or ()), prompt_group_sizes)

    from miles_norm.cli.explanations import explanation_json, print_explanation, select

    selection = select(batch.result, row, rollout, group)
    if as_json:
        sys.stdout.write(strict_json(explanation_json(batch, selection)) + "\n")
        return
    print_explanation(console_for(), batch, selection)
    sys.stdout.flush()
    show_warnings(console_for(stderr=True), batch.warnings)


app.command(cls=Command, epilog="Example: miles-norm audit rollout_*.pt --config configs/grpo.yaml -o report.html")(
    audit
)
app.command(cls=Command, epilog="Example: miles-norm diff configs/grpo.yaml configs/dr_grpo.yaml --dump rollout_0.pt")(
    diff
)


@app.command(
    cls=Command, epilog="Example: miles-norm convert rollout_0.jsonl train_0.safetensors --config configs/grpo.yaml"
)
@exit_codes()
def convert(
    dump: Dump,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Train data to write: .safetensors or .parquet.")],
    config: Config = None,
    settings: Settings = None,
    prompt_group_sizes: Sizes = None,
    force: Annotated[bool, typer.Option("--force", metavar=FLAG, help="Replace OUT if it exists.")] = False,
) -> None:
    """Write what a trainer eats: tokens, masks, log-probs, ids, advantages and loss weights in columns."""
    check_output(out, dump, TRAIN_ENDINGS, force=force)

    from miles_norm.cli.conversion import convert_dump

    data, warnings = convert_dump(dump, out, read_config(config, settings or ()), prompt_group_sizes)
    messages = console_for(stderr=True)
    show_warnings(messages, warnings)
    show_lines(messages, f"{out}: {data.num_rows} rows, {data.num_tokens} tokens", head="wrote ", style="green")


@app.command(cls=Command, epilog="Example: miles-norm plan rollout_0.pt --rollouts-per-update 8 --leftover carry")
@exit_codes()
def plan(
    dump: Dump,
    rollouts_per_update: Annotated[
        int | None, typer.Option(metavar="M", help="Rollouts in an update; by default all of them in one.")
    ] = None,
    leftover: Annotated[
        str | None, typer.Option(metavar="POLICY", help="What fills no update: smaller_update (default), drop, carry.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(metavar="UNIT", help="What fills an update: rollouts (default), or rows.")
    ] = None,
    rows_per_update: Annotated[
        int | None, typer.Option(metavar="K", help="With --unit rows: rows in an update, a mini-batch.")
    ] = None,
    max_updates: Annotated[
        int | None, typer.Option(metavar="U", help="With --unit rows: at most this many updates.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="With --unit rows: which rows are dropped.")] = None,
    max_tokens_per_gpu: Annotated[
        int | None,
        typer.Option(metavar="T", help="Cut updates into micro-batches of at most this many tokens, prompts included."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER",
            help="With --unit rows: normalize_first (default), or drop_first, whose advantages are of the rows left.",
        ),
    ] = None,
    config: Config = None,
    settings: Settings = None,
    prompt_group_sizes: Sizes = None,
    as_json: Json = False,
) -> None:
    """Cut a batch into optimizer steps: what each holds and weighs, and what is dropped, whole or in part."""
    from miles_norm.cli.plan import plan_json, print_plan, update_config

    updates = update_config(
        rollouts_per_update=rollouts_per_update,
        leftover=leftover,
        unit=unit,
        rows_per_update=rows_per_update,
        max_updates=max_updates,
        seed=seed,
        order=order,
        max_tokens_per_gpu=max_tokens_per_gpu,
    )
    batch = load(dump, read_config(config, settings or ()), prompt_group_sizes)
    if as_json:
        sys.stdout.write(strict_json(plan_json(batch, updates)) + "\n")
        return
    print_plan(console_for(), batch, updates)
    sys.stdout.flush()
    show_warnings(console_for(stderr=True), batch.warnings)


EngineName = Annotated[
    str, typer.Option("--engine", metavar="ENGINE", help="embedded (default): a tiny policy in this process; sglang.")
]
EngineUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="With --engine sglang: the server or router that samples.")
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Embedded: weights as .safetensors, by default untrained ones. sglang: the folder of the model, "
        "for its tokenizer and chat template.",
    ),
]


@app.command(cls=Command, epilog="Example: miles-norm serve --set port=8811 --set journal=sessions.journal")
@exit_codes()
def serve(
    engine: EngineName = "embedded",
    engine_url: EngineUrl = None,
    model: Model = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings of the server.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One setting, such as port=8811 or journal=sessions.journal; may be repeated. "
            "docs/session_server.md lists all of them.",
        ),
    ] = None,
) -> None:
    """Serve sessions: an OpenAI endpoint for each rollout, which records its turns as training rows.

    The key that requests must bear, if any, is taken from the environment variable MILES_NORM_API_KEY.
    """
    from miles_norm.cli.agents import api_key
    from miles_norm.cli.engines import EngineChoice

    choice = EngineChoice(engine, engine_url, model)

    from miles_norm.cli.serving import run_server
    from miles_norm.session.server.config import ServerConfig

    given = read_settings(ServerConfig, config, settings or ())
    given.setdefault("api_key", api_key())
    run_server(console_for(stderr=True), choice, ServerConfig(**given))


@app.command(
    cls=Command, epilog="Example: miles-norm rollout --agent my_agent:solve --prompts prompts.jsonl -o rollout_0.jsonl"
)
@exit_codes()
def rollout(  # the command line is what the options are
    agent: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="An async function, or FILE.py:FUNCTION.")],
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="JSON lines: texts, messages, or objects with prompt.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DUMP", help=".jsonl (.gz, .zst), .parquet, .pt or .safetensors."),
    ],
    n_samples_per_prompt: Annotated[int, typer.Option(metavar="N", help="Rollouts of each prompt.")] = 8,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A session server that runs; by default one is started for the command."),
    ] = None,
    engine: EngineName = "embedded",
    engine_url: EngineUrl = None,
    model: Model = None,
    engine_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait so long for an engine that is still starting.")
    ] = 60,
    concurrency: Annotated[int, typer.Option(metavar="N", help="Rollouts at a time.")] = 64,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End a rollout that takes longer; it counts as aborted.")
    ] = None,
    picker: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Which leaves become rows: drop_retries (a retried first turn stays: it may as well be a "
            "sub-agent), keep_all.",
        ),
    ] = ("drop_retries"),
    max_seq_len: Annotated[int | None, typer.Option(metavar="T", help="Most tokens of a row.")] = None,
    request: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="For the agent's requests, such as temperature=0.7; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar=FLAG, help="Replace DUMP if it exists.")] = False,
) -> None:
    """Run an agent on prompts and write the rows of its rollouts as a dump, ready for normalize."""
    replaces_prompts = is_there(output) and is_there(prompts) and output.samefile(prompts)
    check_output(output, prompts, DUMP_ENDINGS, force=force and not replaces_prompts)

    from miles_norm.cli.agents import api_key, load_agent, read_prompts, request_kwargs
    from miles_norm.cli.engines import EngineChoice
    from miles_norm.session.addresses import http_address
    from miles_norm.session.batch import RolloutOptions

    choice = EngineChoice(engine, engine_url, model, engine_timeout)
    address = None if server is None else http_address(server, "session server")
    options = RolloutOptions(
        n_samples_per_prompt=n_samples_per_prompt,
        concurrency=concurrency,
        timeout_seconds=timeout,
        picker=picker,  # type: ignore[arg-type]  # checked there
        max_seq_len=max_seq_len,
        api_key=api_key(),
        request_kwargs=request_kwargs(request or ()),
    )
    given, played = read_prompts(prompts), load_agent(agent)
    # What could be wrong without it has been checked before torch is loaded.
    from miles_norm.cli.rolling import Batch, part_of, roll_out, write_batch

    check_output(part_of(output), prompts, (".part.jsonl",), force=force)
    batch, messages = Batch(given, options), console_for(stderr=True)
    with kept_warnings() as warnings:
        roll_out(played, batch, output, address, choice)
    show_warnings(messages, warnings)
    write_batch(messages, batch, output)
    if batch.interrupted:
        raise typer.Exit(130)
    if batch.error is not None:
        raise batch.error
    if batch.aborted == len(batch.rollouts):
        raise typer.Exit(2)  # nothing to train on


def _check_selectors(row: int | None, rollout: str | None, group: str | None) -> None:
    given = [name for name, value in (("--row", row), ("--rollout", rollout), ("--group", group)) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "what to explain",
            got=" and ".join(given) or "none of --row, --rollout, --group",
            expected="exactly one of --row, --rollout, --group",
            reason="each names something else",
            remedy="write for example: miles-norm explain rollout_0.pt --row 12",
        )


@app.command(cls=Command, epilog="Example: miles-norm config --set advantage_estimator=rloo > rloo.yaml")
@exit_codes()
def config(config: Config = None, settings: Settings = None) -> None:
    """Print every setting with its meaning, choices and value, as YAML that --config reads.

    Without options these are the defaults; with them, what normalize would use. Keep the lines that you change.
    """
    sys.stdout.write(read_config(config, settings or ()).to_yaml(comments=True))
