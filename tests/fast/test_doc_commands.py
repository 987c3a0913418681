"""Every command that the documents show is run, or its options are checked and the reason stands here."""

import ast
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from doc_blocks import PAGES, ROOT, Block, blocks, every_block

from miles_norm.cli import main
from miles_norm.cli.commands import app
from miles_norm.config import LossConfig, NormalizationConfig
from miles_norm.integrations import miles_flags

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    line.strip().lower()
    for path in (ROOT / "constraints.txt", *(ROOT / "requirements").glob("*.txt"))
    for line in path.read_text(encoding="utf-8").splitlines()
}
STANDS_FOR = {
    "DUMP": "examples/data/miles_session_v2.pt",
    "A.yaml": "configs/grpo.yaml",
    "B.yaml": "configs/dr_grpo.yaml",
}
NOT_RUN = {
    "miles-norm serve": "does not end; tests/session serves, its options are parsed here",
    "miles-norm rollout --engine sglang": "needs an SGLang server; tests/sglang, its options are parsed here",
    "make": "makes a virtual environment; CI runs it, the target is looked up here",
    "pip": "installs; what it names is looked up here",
    "python examples/bias_study/run.py": "200,000 rollouts; tests/fast/test_bias_study.py runs a short study",
    "python examples/train_tiny_agent/": "trains for minutes; tests/session trains for seconds",
    "python3 -m venv": "Python's own",
    "python -m sglang_cpu.": "needs SGLang; tests/sglang runs both, their options are looked up here",
    "python -m sglang.launch_server": "needs a GPU",
    "python -m smg.launch_router": "needs SGLang; tests/sglang/test_workers.py starts it with these options",
    "ray job submit": "needs a Ray cluster; the variables that it sets are looked up here",
    "--": "flags of a trainer; the functions that they name are imported here",
    "+algorithm.miles_norm.": "settings in verl's command line; they are made into settings here",
}
SHELL = blocks("bash")
SHOWN = blocks("console")


def plain(words: list[str]) -> str:
    """The command as one types it, whatever environment its program is in."""
    return " ".join([words[0].removeprefix(".venv-sglang/bin/").removeprefix(".venv/bin/"), *words[1:]])


def excuse(words: list[str]) -> str | None:
    return next((begin for begin in NOT_RUN if plain(words).startswith(begin)), None)


@pytest.fixture(name="workshop")
def fixture_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name: configs, examples, an agent and its prompts."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    example = ROOT / "examples/session_v2_agentic"
    shutil.copy(example / "prompts.jsonl", tmp_path)
    agent = (example / "agent.py").read_text(encoding="utf-8")
    (tmp_path / "my_agent.py").write_text(agent + "\n\nsolve = open_boxes\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    return tmp_path


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
@pytest.mark.usefixtures("workshop")
def test_commands_run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for words in block.commands:
        if excuse(words) is None:
            assert words[0] == "miles-norm"
            code = main([STANDS_FOR.get(word, word) for word in words[1:]])
            # diff ends with 1 where anything changes, as its page says.
            assert code == (words[1] == "diff"), capsys.readouterr().err
        else:
            check(words)


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.name)
def test_commands_print_what_is_shown(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "110")
    command, _, output = block.text.partition("\n")
    prompt, program, *words = command.split()
    assert (prompt, program) == ("$", "miles-norm")
    main(words)
    assert capsys.readouterr().out == output


def in_text() -> list[Block]:
    """Commands within a sentence, some of them without what they would need to run."""
    found = []
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        commands = re.findall(r"`((?:miles-norm|make|python3?|pip) [^`]+)`", text)
        page = path.relative_to(ROOT).as_posix()
        found += [Block(page, 0, "inline", command.replace("\n", " ")) for command in commands]
    return found


@pytest.mark.parametrize("block", in_text(), ids=lambda block: block.text)
def test_commands_in_sentences_are_right(block: Block) -> None:
    for words in block.commands:
        check(words)


def test_every_excuse_is_needed() -> None:
    used = {excuse(words) for block in SHELL for words in block.commands}
    assert set(NOT_RUN) - used == set()


def test_every_block_says_what_it_is() -> None:
    """An indented block, or a fence of another kind, would not be looked at."""
    assert {block.language for block in every_block()} == {"bash", "console", "python", "text"}
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert "```" not in text
        if "docs/api" not in path.as_posix():  # where the options of a directive are indented
            assert re.findall(r"^\n {4}.*", text, flags=re.MULTILINE) == []


def check(words: list[str]) -> None:
    """What can be said of a command that is not run."""
    program = Path(words[0]).name
    if program.startswith("--"):
        return check_trainer_flag(words)
    if program.startswith("+algorithm"):
        return check_verl_setting(words)
    return CHECKS[program](words[1:])


def check_trainer_flag(words: list[str]) -> None:
    assert all(word.startswith("--") for word in words[::2])
    for path in words[1::2]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))


def check_verl_setting(words: list[str]) -> None:
    for word in words:
        path, _, value = word.partition("=")
        section, _, field = path.removeprefix("+algorithm.miles_norm.").partition(".")
        model = {"normalization": NormalizationConfig, "loss": LossConfig}[section]
        assert model(**{field: value}).model_dump()[field] == value


def check_miles_norm(words: list[str]) -> None:
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} - known == set()


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    frameworks = re.findall(r"^FRAMEWORKS := (.*)$", makefile, flags=re.MULTILINE)[0].split()
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)[0].split()
    targets = {*phony, *(f"test-{framework}" for framework in frameworks)}
    for word in words:
        name, assigned, _ = word.partition("=")
        assert re.search(rf"^{name} \?=", makefile, flags=re.MULTILINE) if assigned else word in targets


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    flags = {"--index-url", "--no-deps", "-r"}
    for before, word in pairwise(words):
        name = re.fullmatch(r"(?:\.|miles-norm)\[([\w,-]+)\]", word)
        if name:
            assert set(name[1].split(",")) <= set(PROJECT["optional-dependencies"])
        elif before == "--index-url":
            assert word == "INDEX_OF_CPU_WHEELS"
        elif before == "-r" or "/" in word:
            assert (ROOT / word).exists()
        else:
            assert word in {".", "torch", *flags} or word in PINS


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "venv"] or words[:2] in (["-m", "sglang.launch_server"], ["-m", "smg.launch_router"]):
        return
    if words[0] == "-c":
        ast.parse(words[1])
        return
    script = f"tools/sglang_cpu/{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
    code = (ROOT / script).read_text(encoding="utf-8")
    for flag in (word for word in words[1:] if word.startswith("-")):
        # Written out, or the name of a parameter that typer makes an option of.
        parameter = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in code or re.search(rf"^    {parameter}: Annotated", code, flags=re.MULTILINE)


def check_ray(words: list[str]) -> None:
    given = json.loads(words[words.index("--runtime-env-json") + 1])
    assert set(given["env_vars"]) <= {miles_flags.CONFIG_VARIABLE, miles_flags.LOSS_CONFIG_VARIABLE}


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "miles-norm": check_miles_norm,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "ray": check_ray,
}
