"""The command line: ``miles-norm normalize``, ``explain``, ``audit``, ``diff``, ``plan``, ``convert`` and ``config``.

Data goes to stdout, messages go to stderr. Exit codes: 0; 1 if ``diff`` finds a change; 2 for anything that the user
can mend; 130 after Ctrl-C.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

__all__ = ["main"]

_INTERRUPTED = 130
_EXIT_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``miles-norm`` with ``argv``, by default the arguments of the process, and return its exit code."""
    code = _run(argv)
    if argv is None and (background := sys.modules.get("miles_norm.cli.background")) is not None:
        # The process ends now, whatever the agents that it ran have left behind.
        background.exit_within(_EXIT_SECONDS, code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An id that the terminal's encoding lacks is shown escaped instead of ending the program.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            from miles_norm.cli.commands import app
            from miles_norm.cli.usage import run
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in ("typer", "rich", "click"):
                raise
            sys.stderr.write(f"miles-norm needs the package {package}: pip install 'miles-norm[cli]'\n")
            return 2
        return run(app, argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
