"""Every other way to fail: exit codes and messages; and signs of life."""

import errno
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import EXAMPLE, Run, many_groups
from rich.console import Console

import miles_norm
from miles_norm import read_dump
from miles_norm.cli import commands, main, waiting


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory"),
        ("", "an empty file"),
        ("[1]\n", "a JSON array, not an object"),
        ("[1]\n", "  remedy:   write one row per line\n"),
        ('{"samples": [{"reward": 1}]}\n', "  remedy:   write one row per line, or save the whole dump as .pt\n"),
        ('{"reward": "0.5", "response_length": 1}\n', "the str '0.5'"),
        ('{"reward": 1.0}\n', "neither loss_mask nor response_length"),
    ],
)
def test_dumps_that_cannot_be_used(run: Callable[..., Run], tmp_path: Path, content: str | None, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    refused = run("normalize", path)
    assert (refused.code, refused.out) == (2, "")
    assert text in refused.err
    assert [name for name in ("got", "expected", "reason", "remedy") if f"  {name}:" not in refused.err] == []


@pytest.mark.parametrize(
    ("arguments", "command", "got"),
    [
        (("normalize",), "miles-norm normalize", "missing argument 'DUMP'"),
        (("nothing",), "miles-norm", "no such command 'nothing'"),
        (("explain", EXAMPLE, "--row", "x"), "miles-norm explain", "'x' for --row, which is not a whole number"),
        (("explain", EXAMPLE, "--row", "1.5"), "miles-norm explain", "'1.5' for --row, which is not a whole number"),
        (("config", "--nothing"), "miles-norm config", "no such option: --nothing"),
        (("config", "more"), "miles-norm config", "unexpected extra argument"),
        (("normalize", EXAMPLE, "--set"), "miles-norm", "option '--set' requires an argument"),
    ],
    ids=str,
)
def test_usage_errors_look_like_the_others(
    run: Callable[..., Run], arguments: tuple[object, ...], command: str, got: str
) -> None:
    refused = run(*arguments)
    assert (refused.code, refused.out) == (2, "")
    lines = refused.err.splitlines()
    assert lines[0] == command
    assert lines[1].startswith(f"  got:      {got}")
    assert lines[-1] == f"  remedy:   {command} --help lists what there is"
    assert all(line.startswith("  expected: miles-norm ") for line in lines[2:-1])
    assert not set("╭│╰") & set(refused.err)
    assert "Input should" not in refused.err


def test_without_arguments_the_help_is_shown(run: Callable[..., Run]) -> None:
    shown = run()
    assert (shown.code, shown.err) == (2, "")
    assert "Usage: miles-norm" in shown.out


def test_version_and_help(run: Callable[..., Run]) -> None:
    assert run("--version").out == f"miles-norm {miles_norm.__version__}\n"
    for command in ((), ("normalize",), ("explain",), ("convert",), ("plan",), ("config",)):
        shown = run(*command, "--help")
        assert shown.code == 0
        assert "Example:" in shown.out
        # A flag has no value, so that no type stands beside it.
        assert "bool" not in shown.out.lower()
        words = " ".join(word for word in shown.out.split() if word not in ("│", "╭", "╰"))
        if command not in ((), ("config",)):
            assert "A row needs reward, group_index, rollout_id or index, and loss_mask or response_length" in words
            assert "docs/semantics.md" in words
        if command:
            assert "options.whitening=rollout" in words
            assert "miles-norm config prints all of them" in words


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "out of memory: the dump does not fit"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "cannot write the output: No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_stops_the_program_from_outside(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "load", load)
    stopped = run("normalize", EXAMPLE)
    assert (stopped.code, stopped.out) == (code, "")
    assert stopped.err.startswith(text)
    assert stopped.err.count("\n") == (1 if text else 0)


LONG = "n" * 300
"""No file can have this name."""


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (("audit", f"{LONG}.pt"), f"rollout dump {LONG}.pt"),
        (("normalize", f"{LONG}.pt"), f"rollout dump {LONG}.pt"),
        (("normalize", EXAMPLE, "-o", f"{LONG}.jsonl"), f"output {LONG}.jsonl"),
        (("normalize", EXAMPLE, "-o", f"{LONG}/a.jsonl"), f"output {LONG}/a.jsonl"),
        (("convert", EXAMPLE, f"{LONG}.parquet"), f"output {LONG}.parquet"),
        (("audit", EXAMPLE, "-o", f"{LONG}.html"), f"output {LONG}.html"),
        (("rollout", "--agent", "a:f", "--prompts", "p", "-o", f"{LONG}.jsonl"), f"output {LONG}.jsonl"),
        (("serve", "--model", LONG), f"--model {LONG}"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_names_that_no_file_can_have(run: Callable[..., Run], arguments: tuple[object, ...], subject: str) -> None:
    refused = run(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.splitlines()[0] == subject
    assert "cannot write the output" not in refused.err


@pytest.mark.parametrize("command", [("normalize", EXAMPLE), ("normalize", EXAMPLE, "--json"), ("config",)], ids=str)
def test_a_closed_pipe_is_no_error_message(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]
) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        code = main([str(argument) for argument in command])
    assert code == 141
    assert run("--version").err == ""


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("miles_norm.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    refused = run("config")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "pip install 'miles-norm[cli]'" in refused.err


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (60.0, False)])
def test_a_bar_comes_late_and_goes(
    jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, patience: float, shown: bool
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=80)
    monkeypatch.setattr(waiting, "console_for", lambda **_: console)
    monkeypatch.setattr(waiting, "PATIENCE", patience)
    path = jsonl(*many_groups(20))

    def wait_for(text: str) -> None:
        end = time.monotonic() + 5
        while shown and text not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)

    with waiting.bar("reading rows.jsonl") as progress:
        assert progress is not None
        read_dump(path, progress=progress)
        wait_for("reading")
    with waiting.status("normalizing"):
        wait_for("normalizing")
    assert ("reading rows.jsonl" in stream.getvalue()) == shown
    assert ("normalizing" in stream.getvalue()) == shown
    # Transient: the last thing written erases the line.
    assert not shown or stream.getvalue().endswith("\x1b[2K")


def test_no_bar_without_a_terminal(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    assert run("normalize", EXAMPLE, "-o", tmp_path / "out.jsonl").err.startswith("wrote ")
    with waiting.bar("reading") as progress:
        assert progress is None
