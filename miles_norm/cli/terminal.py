"""What the commands share about the terminal: widths, texts, errors and exit codes."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from miles_norm.errors import MilesNormError

__all__ = ["console_for", "exit_codes", "printable", "show_lines", "show_warnings"]

_UNBOUNDED = 100_000
"""Columns where nothing limits them: a piped line is never broken, so that it can be searched."""

_BROKEN_PIPE = 141
_INDENT = re.compile(r" +\S+ +|[a-z]+: ")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to ``exit_codes``, which knows of all of stdout."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console_for(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal or ``COLUMNS`` say, without a limit in a pipe; it interprets no markup."""
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _UNBOUNDED
    return console


def printable(text: str) -> str:
    r"""Escape what would move the cursor or change colours: ids come from files.

    >>> print(printable("a" + chr(27) + "[2J"))
    a\x1b[2J
    """
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def show_lines(console: Console, text: str, *, head: str = "", style: str = "") -> None:
    """Print lines, wrapped under where their text begins; ``style`` is for the first one, or for ``head`` before it."""
    for number, line in enumerate(f"{head}{printable(text)}".splitlines()):
        found = _INDENT.match(line)
        wrapped = textwrap.wrap(
            line,
            max(console.width, 20),
            subsequent_indent=" " * (found.end() if found else 0),
            break_long_words=False,
            break_on_hyphens=False,
        )
        shown = Text("\n".join(wrapped))
        if number == 0 and style:
            shown.stylize(style, 0, len(head) or len(shown))
        console.print(shown)


def show_warnings(console: Console, warnings: list[str]) -> None:
    """Print each warning on lines of its own."""
    for text in warnings:
        show_lines(console, text, head="warning: ", style="yellow")


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what the user can mend, or wished for, into a message on stderr and an exit code, without a traceback."""
    try:
        yield
        sys.stdout.flush()
    except MilesNormError as error:
        show_lines(console_for(stderr=True), str(error), style="bold red")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except MemoryError:
        _fail("out of memory: the dump does not fit; split it between prompt groups, or use a machine with more memory")
    except OSError as error:
        _silence_stdout()
        if error.errno == errno.EPIPE:
            raise typer.Exit(_BROKEN_PIPE) from None
        # Files have errors of their own; what is left is stdout, which has no name.
        named = "cannot write the output" if error.filename is None else str(error.filename)
        _fail(f"{named}: {error.strerror or error}")


def _fail(message: str) -> NoReturn:
    show_lines(console_for(stderr=True), message, style="bold red")
    raise typer.Exit(2) from None


def _silence_stdout() -> None:
    """Nobody takes what stdout still holds, and the interpreter must not complain of that when it ends."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        # A stdout without a file behind it, as inside another program, has nothing to flush.
        return
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), stdout)
