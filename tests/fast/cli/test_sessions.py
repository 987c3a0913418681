"""``miles-norm rollout`` and what ``serve`` refuses; the server itself is tested in tests/session."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from safetensors.torch import save

from miles_norm import read_dump
from miles_norm.cli.agents import read_prompts
from miles_norm.session.rollout import Prompt

AGENT = """
import asyncio
import pathlib
import aiohttp

async def solve(*, base_url, prompt, request_kwargs, metadata, **kwargs):
    if prompt == "fail":
        raise ValueError("no such task")
    body = {"messages": [{"role": "user", "content": prompt}], **request_kwargs}
    async with aiohttp.ClientSession() as http:
        for _ in range(metadata.get("calls", 1)):
            async with http.post(f"{base_url}/v1/chat/completions", json=body) as answer:
                await answer.json()
    return {"reward": float(len(prompt)), "calls": metadata.get("calls", 1)}

async def counts(*, prompt, **kwargs):
    await solve(prompt="x", **kwargs)
    return {"reward": float(len(prompt))}

async def obstructs(*, metadata, **kwargs):
    pathlib.Path(metadata["folder"]).mkdir(exist_ok=True)
    return await solve(metadata=metadata, **kwargs)

async def cancels(*, prompt, **kwargs):
    if prompt == "bad":
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)
    return await solve(prompt=prompt, **kwargs)

def not_async(**kwargs):
    return None
"""


@pytest.fixture(name="agent")
def fixture_agent(tmp_path: Path) -> Iterator[Path]:
    path, modules, places = tmp_path / "cli_agent.py", set(sys.modules), list(sys.path)
    path.write_text(AGENT)
    yield path
    sys.path[:] = places
    for name in set(sys.modules) - modules:
        if name == "cli_agent":
            del sys.modules[name]


def prompts(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_rollout_becomes_a_dump(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    # Two tasks, two rollouts each; the first task's agent asks twice for the same thing: two roots, two rows.
    given = prompts(tmp_path, {"prompt": "ab", "label": "x", "metadata": {"calls": 2}}, "cde")
    out = tmp_path / "rollout.jsonl"
    done = run(
        "rollout", "--agent", f"{agent}:solve", "--prompts", given, "-o", out,
        "--n-samples-per-prompt", 2, "--request", "max_tokens=5",
    )  # fmt: skip
    assert (done.code, done.out) == (0, "")
    assert done.err == f"wrote {out}: 6 rows of 4 rollouts, fan-out 1 to 2\n"
    rows = read_dump(out).samples
    assert [(row["group_index"], row["rollout_id"], row["reward"], row["label"]) for row in rows] == [
        *[(0, 0, 2.0, "x")] * 2, *[(0, 1, 2.0, "x")] * 2, (1, 2, 3.0, None), (1, 3, 3.0, None),
    ]  # fmt: skip
    assert all(row["response_length"] <= 5 and sum(row["loss_mask"]) == row["response_length"] for row in rows)
    assert rows[0]["metadata"]["calls"] == 2
    normalized = run("normalize", out)
    assert normalized.code == 0
    assert "6 rows, 4 rollouts, 2 prompt groups" in normalized.out


def test_an_agent_that_raises_costs_its_rollout(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollout.jsonl"
    given = prompts(tmp_path, "fail", "ab")
    done = run("rollout", "--agent", f"{agent}:solve", "--prompts", given, "-o", out, "--n-samples-per-prompt", 1)
    assert done.code == 0
    assert "rollout 0 was aborted: ValueError: no such task" in done.err
    assert "1 rollout aborted" in done.err
    aborted, scored = read_dump(out).samples
    assert (aborted["status"], aborted["reward"], aborted["tokens"]) == ("aborted", None, [])
    assert aborted["metadata"]["error"] == "ValueError: no such task"
    assert scored["reward"] == 2.0


@pytest.mark.parametrize(
    ("name", "got", "remedy"),
    [
        ("solve", "no module and function", "write: async def agent("),
        ("{path}:nobody", "no function nobody", "write: async def agent("),
        ("{path}:not_async", "not_async, which is not async", "write: async def agent("),
        ("no_such_module_here:solve", "ModuleNotFoundError", "check the path"),
        ("{path}.py:solve", "FileNotFoundError", "check the path"),
    ],
)
def test_agents_that_cannot_be_run(
    run: Callable[..., Run], agent: Path, tmp_path: Path, name: str, got: str, remedy: str
) -> None:
    done = run(
        "rollout", "--agent", name.format(path=agent), "--prompts", prompts(tmp_path, "a"), "-o", tmp_path / "o.jsonl"
    )
    assert done.code == 2
    assert "agent '" in done.err
    assert got in done.err
    assert f"remedy:   {remedy}" in done.err


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "no prompts"),
        ("{\n", "line 1: no JSON, Expecting property name enclosed in double quotes at column 2"),
        ("[" * 100_000, "line 1: maximum recursion depth exceeded"),
        ('"a"\n\n{"prompt": 3}\n', "line 3: the prompt is 3, and neither a text nor a list of messages"),
        ('{"prompt": "a", "lable": "x"}\n', "line 1: unknown lable"),
        (
            '{"prompt": "a", "label": 4}\n"b"\n{"label": "x"}\n',
            "line 1: the label is 4, and no text; line 3: no prompt",
        ),
        ('[{"role": "usr", "content": "a"}, "b"]\n', "line 1: message 0: the role is 'usr', and none of system"),
        ('[{"role": "user", "content": "a"}, "b"]\n', "line 1: message 1: it is 'b', and no object"),
        ('"a"\n' + "3\n" * 12, "line 11: the prompt is 3, and neither a text nor a list of messages; and 2 more"),
    ],
)
def test_prompts_that_cannot_be_read(run: Callable[..., Run], agent: Path, tmp_path: Path, text: str, got: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    done = run("rollout", "--agent", f"{agent}:solve", "--prompts", path, "-o", tmp_path / "o.jsonl")
    assert done.code == 2
    assert got in done.err
    assert f"prompts {path}\n" in done.err


def test_prompts_that_are_not_there(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    done = run("rollout", "--agent", f"{agent}:solve", "--prompts", tmp_path / "no", "-o", tmp_path / "o.jsonl")
    assert done.code == 2
    assert "got:      No such file or directory" in done.err
    assert "remedy:   check the path" in done.err


def test_messages_are_a_prompt(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    out, messages = tmp_path / "o.jsonl", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    given = prompts(tmp_path, messages, {"prompt": messages, "label": "x"})
    done = run("rollout", "--agent", f"{agent}:counts", "--prompts", given, "-o", out, "--n-samples-per-prompt", 1)
    assert done.code == 0, done.err
    rows = read_dump(out).samples
    assert [(row["prompt"], row["reward"], row["label"]) for row in rows] == [
        (messages, 2.0, None),
        (messages, 2.0, "x"),
    ]


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (("--server", "127.0.0.1:8811"), "address of the session server\n  got:      '127.0.0.1:8811'"),
        (("--server", "http://127.0.0.1:88110"), "address of the session server"),
        (("--server", "http://key@127.0.0.1:8811"), "a key does not belong into it"),
        (("--engine-timeout", "-1"), "--engine-timeout\n  got:      -1"),
        (("--engine-timeout", "nan"), "--engine-timeout\n  got:      nan"),
        (("--engine-timeout", "inf"), "--engine-timeout\n  got:      inf"),
        (("--n-samples-per-prompt", "1000000000"), "n_samples_per_prompt: input should be less than or equal to 65536"),
        (("--concurrency", "0"), "concurrency=0"),
        (("--timeout", "nan"), "timeout_seconds=nan"),
        (("--model", "nowhere"), "--model nowhere\n  got:      no such file or folder"),
        (("--engine", "sglang", "--engine-url", "x:1", "--model", "."), "address of the engine\n  got:      'x:1'"),
    ],
)  # fmt: skip
def test_options_are_refused_before_anything_is_loaded(
    run: Callable[..., Run], agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, got: str
) -> None:
    monkeypatch.setitem(sys.modules, "miles_norm.cli.rolling", None)  # importing it would raise
    out = tmp_path / "o.jsonl"
    done = run("rollout", "--agent", f"{agent}:solve", "--prompts", prompts(tmp_path, "a"), "-o", out, *arguments)
    assert done.code == 2
    assert got in done.err


def test_what_is_refused_early_needs_no_torch(tmp_path: Path) -> None:
    """In a process of its own, where nothing else has loaded it."""
    prompts(tmp_path, "a")
    code = (
        "import sys; from miles_norm.cli import main; "
        "code = main(['rollout', '--agent', 'nowhere:solve', '--prompts', 'prompts.jsonl', '-o', 'o.pt']); "
        "print(code, sorted({'torch', 'aiohttp', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "2 []\n"
    assert "ModuleNotFoundError: No module named 'nowhere'" in done.stderr


def test_the_same_failure_is_said_once(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    given = prompts(tmp_path, "fail", "ab", "fail")
    done = run(
        "rollout", "--agent", f"{agent}:solve", "--prompts", given, "-o", tmp_path / "o.jsonl",
        "--n-samples-per-prompt", 2,
    )  # fmt: skip
    assert done.code == 0
    assert done.err.count("no such task") == 1
    assert "4 rollouts were aborted: ValueError: no such task (rollouts 0, 1, 4, 5)" in done.err


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"no weights", "weights {path}\n  got:      Error while deserializing"),
        (b"", "weights {path}\n  got:      an empty file"),
        (None, "--model {path}\n  got:      embedding.weight is missing; "),
    ],
)
def test_weights_that_are_none(
    run: Callable[..., Run], agent: Path, tmp_path: Path, content: bytes | None, got: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content if content is not None else save({f"layer.{n}": torch.zeros(1) for n in range(200)}))
    done = run(
        "rollout", "--agent", f"{agent}:solve", "--prompts", prompts(tmp_path, "a"), "-o", tmp_path / "o.jsonl",
        "--model", path,
    )  # fmt: skip
    assert done.code == 2
    assert got.format(path=path) in done.err
    assert "rows are read" not in done.err
    assert len(done.err) < 1500


def test_a_dump_that_cannot_be_written_leaves_its_rows_beside_it(
    run: Callable[..., Run], agent: Path, tmp_path: Path
) -> None:
    """The agent makes a folder where the dump should be."""
    out = tmp_path / "o.parquet"
    given = prompts(tmp_path, {"prompt": "ab", "metadata": {"folder": str(out)}})
    command = ("rollout", "--agent", f"{agent}:obstructs", "--prompts", given, "-o", out, "--n-samples-per-prompt", 2)
    done = run(*command)
    part = tmp_path / "o.parquet.part.jsonl"
    assert done.code == 2
    assert f"kept: finished rollouts are in {part}" in done.err
    assert sorted(row["rollout_id"] for row in read_dump(part).samples) == [0, 1]
    out.rmdir()
    again = run(*command)
    assert again.code == 2
    assert f"output {part}\n  got:      a file that exists" in again.err


def test_an_agent_that_cancels_the_batch(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "o.jsonl", prompts(tmp_path, "ab", "bad", "c")
    done = run(
        "rollout", "--agent", f"{agent}:cancels", "--prompts", given, "-o", out, "--n-samples-per-prompt", 1,
        "--concurrency", 1,
    )  # fmt: skip
    assert done.code == 2
    assert "ended early: 1 of 3 rollouts had finished; without any: prompt groups 1, 2" in done.err
    assert "rollouts 1, 2\n  got:      cancelled before the end" in done.err
    assert [row["rollout_id"] for row in read_dump(out).samples] == [0]


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (("--engine", "gpt"), "gpt"),
        (("--engine", "sglang"), "no --engine-url and --model"),
        (("--engine-url", "http://127.0.0.1:1"), "--engine-url with the embedded engine"),
        (("--model", "nowhere.safetensors"), "--model nowhere.safetensors"),
        (("--set", "port=-1"), "port"),
        (("--set", "ports=1"), "ports"),
        (("--set", "host=256.0.0.1"), "address 256.0.0.1"),
    ],
)
def test_what_serve_refuses(run: Callable[..., Run], arguments: tuple[str, ...], got: str) -> None:
    done = run("serve", *arguments)
    assert done.code == 2
    assert got in done.err


def test_a_request_setting_needs_a_value(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    done = run(
        "rollout", "--agent", f"{agent}:solve", "--prompts", prompts(tmp_path, "a"), "-o", tmp_path / "o.jsonl",
        "--request", "temperature",
    )  # fmt: skip
    assert done.code == 2
    assert "--request temperature" in done.err


def test_a_dump_of_aborted_rollouts_only_is_written_and_no_success(
    run: Callable[..., Run], agent: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rollout.jsonl"
    done = run("rollout", "--agent", f"{agent}:solve", "--prompts", prompts(tmp_path, "fail"), "-o", out)
    assert done.code == 2
    assert {row["status"] for row in read_dump(out).samples} == {"aborted"}


def test_a_rollout_without_a_turn_is_converted_with_the_others(
    run: Callable[..., Run], agent: Path, tmp_path: Path
) -> None:
    out, train = tmp_path / "rollout.jsonl", tmp_path / "train.safetensors"
    run("rollout", "--agent", f"{agent}:solve", "--prompts", prompts(tmp_path, "fail", "ab"), "-o", out)
    done = run("convert", out, train, "--set", "missing_reward=exclude")
    assert (done.code, "16 rows" in done.err) == (0, True), done.err


def test_prompts_are_not_replaced_by_the_dump(run: Callable[..., Run], agent: Path, tmp_path: Path) -> None:
    given = prompts(tmp_path, "ab")
    done = run("rollout", "--agent", f"{agent}:solve", "--prompts", given, "-o", given, "--force")
    assert done.code == 2
    assert "the input file" in done.err
    assert given.read_text() == '"ab"\n'


@pytest.mark.parametrize("code", ["raise SystemExit(5)", "def (", "1 / 0"])
def test_an_agent_whose_module_fails(run: Callable[..., Run], tmp_path: Path, code: str) -> None:
    path = tmp_path / "cli_agent.py"
    path.write_text(code)
    done = run("rollout", "--agent", f"{path}:solve", "--prompts", prompts(tmp_path, "a"), "-o", tmp_path / "o.jsonl")
    assert done.code == 2
    assert f"agent '{path}:solve'" in done.err
    sys.modules.pop("cli_agent", None)
    sys.path.remove(str(tmp_path))


def test_lines_end_with_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a\u2028b"\n"c"\n', encoding="utf-8")
    assert read_prompts(path) == [Prompt("a\u2028b"), Prompt("c")]
