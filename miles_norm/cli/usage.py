"""Commands whose help shows no type beside a flag, and errors of usage in the style of all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from miles_norm.cli.terminal import console_for, show_lines

__all__ = ["FLAG", "Command", "Group", "run"]

FLAG = ""
"""The ``metavar`` of a flag, which takes no value."""

_INTERRUPTED = 130
# click's class, which newer versions of typer carry under a name of their own.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _plain(option: Any) -> Any:
    if option is not None:
        option.metavar = FLAG
    return option


class Command(TyperCommand):
    """A command whose ``--help`` is shown like any other flag."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option, without a type."""
        return _plain(super().get_help_option(ctx))


class Group(TyperGroup):
    """The same for the command above them."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option, without a type."""
        return _plain(super().get_help_option(ctx))


def run(app: typer.Typer, argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code; a command line that fits no command is shown as an error."""
    try:
        code = app(args=None if argv is None else list(argv), prog_name="miles-norm", standalone_mode=False)
    except typer.Abort:
        return _INTERRUPTED
    except _UsageError as error:
        # Without any argument the help is shown instead.
        if type(error).__name__ != "NoArgsIsHelpError":
            _show(error)
        return 2
    return code if isinstance(code, int) else 0


def _show(error: Any) -> None:
    command = "miles-norm" if error.ctx is None else error.ctx.command_path
    usage = "" if error.ctx is None else error.ctx.get_usage().partition(": ")[2].strip()
    lines = {"got": _got(error), "expected": " ".join(usage.split()), "remedy": f"{command} --help lists what there is"}
    text = "\n".join([command, *(f"  {name + ':':<9} {line}" for name, line in lines.items() if line)])
    show_lines(console_for(stderr=True), text, style="bold red")


def _got(error: Any) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(error, typer.BadParameter) and hasattr(cause, "errors"):
        problem, option = cause.errors()[0], error.param.opts[0] if error.param else "an argument"
        wanted = "a whole number" if problem["type"].startswith("int_") else f"what fits: {problem['msg']}"
        return f"{problem['input']!r} for {option}, which is not {wanted}"
    message = error.format_message().rstrip(".").removeprefix("Got ")
    return f"{message[:1].lower()}{message[1:]}"
