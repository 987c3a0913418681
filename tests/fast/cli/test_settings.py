"""``config``, ``--config``, ``--set`` and ``--prompt-group-sizes``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from command_line import EXAMPLE, Run

from miles_norm import NormalizationConfig, RolloutDump, write_dump
from miles_norm.config import EstimatorOptions, parse_yaml


def test_config_prints_what_it_reads(run: Callable[..., Run], tmp_path: Path) -> None:
    shown = run("config", "--set", "advantage_estimator=rloo", "--set", "std_epsilon=1e-4", "--set", "device=null")
    path = tmp_path / "rloo.yaml"
    path.write_text(shown.out, encoding="utf-8")
    assert NormalizationConfig.from_yaml(path) == NormalizationConfig(advantage_estimator="rloo", std_epsilon=1e-4)
    fields = set(NormalizationConfig.model_fields)
    assert {line.split(":")[0] for line in shown.lines if not line.startswith(("#", " "))} == fields
    # A comment above every field.
    assert all(shown.lines[n - 1].startswith("#") for n, line in enumerate(shown.lines) if line.split(":")[0] in fields)
    assert run("config", "--config", path).out == shown.out


def test_set_overrides_the_file(run: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("advantage_estimator: rloo\nmin_group_size: 3\n", encoding="utf-8")
    config = run("normalize", EXAMPLE, "--config", path, "--set", "min_group_size=2", "--json").json["config"]
    assert (config["advantage_estimator"], config["min_group_size"]) == ("rloo", 2)


NESTED = "options:\n  whitening: token\n  whitening_shift: true\n"


@pytest.mark.parametrize(
    ("file", "settings", "expected"),
    [
        ("", ["options.whitening=rollout"], {"whitening": "rollout"}),
        ("", ["options.whitening=rollout", "options.whitening_shift=true"], {"whitening": "rollout", "shift": True}),
        ("", ["options={whitening: token}", "options.whitening_shift=true"], {"whitening": "token", "shift": True}),
        ("", ["options.whitening_shift=true", "options={whitening: token}"], {"whitening": "token", "shift": True}),
        ("", ["options={whitening: token}", "options={whitening: rollout}"], {"whitening": "rollout"}),
        ("", ["options.whitening=token", " options . whitening = rollout"], None),
        (NESTED, [], {"whitening": "token", "shift": True}),
        (NESTED, ["options.whitening=rollout"], {"whitening": "rollout", "shift": True}),
        (NESTED, ["options={whitening: rollout}"], {"whitening": "rollout", "shift": True}),
        (NESTED, ["options={}"], {"whitening": "token", "shift": True}),
        # Settings that fit only together may come from both places.
        ("options: {whitening_shift: true}\n", ["options.whitening=token"], {"whitening": "token", "shift": True}),
    ],
)
@pytest.mark.parametrize("command", [("normalize", EXAMPLE, "--json"), ("config",)], ids=["normalize", "config"])
def test_nested_settings_add_up(
    run: Callable[..., Run],
    tmp_path: Path,
    command: tuple[object, ...],
    file: str,
    settings: list[str],
    expected: dict[str, Any] | None,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"std_ddof: 0\n{file}", encoding="utf-8")
    shown = run(*command, "--config", path, *(part for text in settings for part in ("--set", text)))
    if expected is None:
        assert "no such field" in shown.err
        return
    config = shown.json["config"] if command[0] == "normalize" else parse_yaml(shown.out, "config")
    assert config["std_ddof"] == 0
    options = config["options"]
    assert {"whitening": options["whitening"], "shift": options["whitening_shift"]} == {"shift": False, **expected}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("options.whitening: token\n", "'whitening' stands indented below 'options:'"),
        ("options:\n  whitning: token\n", "options.whitning: no such field (did you mean 'options.whitening'?)"),
        ("options: [whitening]\n", "options: input should be a mapping of field names to values"),
    ],
)
def test_files_nest(run: Callable[..., Run], tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    refused = run("config", "--config", path)
    assert (refused.code, refused.out) == (2, "")
    assert message in refused.err
    assert "remedy:   correct or remove what is named above; `miles-norm config` prints" in refused.err


def test_config_lists_the_values_of_every_choice(run: Callable[..., Run]) -> None:
    lines = run("config").lines
    for model, indent in ((NormalizationConfig, ""), (EstimatorOptions, "  ")):
        for name, field in model.model_fields.items():
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            [at] = [number for number, line in enumerate(lines) if line.startswith(f"{indent}{name}:")]
            first = next(n for n in range(at - 1, -1, -1) if n == 0 or not lines[n - 1].lstrip().startswith("#"))
            comment = " ".join(line.strip().removeprefix("# ") for line in lines[first:at])
            assert comment.endswith(f"One of: {', '.join(map(str, choices))}.") == bool(choices), name
    assert max(map(len, lines)) <= 102


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--set", "advantage_estimater=rloo"), ["did you mean 'advantage_estimator'?"]),
        (("--set", "rloo"), ["--set rloo\n", "no key=value"]),
        (("--set", "=1"), ["no key=value"]),
        (("--set", "options.=1"), ["no key=value"]),
        (("--set", ".k=1"), ["no key=value"]),
        (("--set", "options.whitning=token"), ["options.whitning='token'", "(did you mean 'options.whitening'?)"]),
        (("--set", "option.whitening=token"), ["(did you mean 'options.whitening'?)"]),
        (("--set", "whitening=token"), ["whitening: no such field (did you mean 'options.whitening'?)"]),
        (("--set", "options={whitning: token}"), ["options.whitning='token'", "did you mean 'options.whitening'?"]),
        (("--set", "options.xyz=1"), ["options.xyz: no such field (those of 'options': pass_at_k, k, gdpo_"]),
        (("--set", "options.k.j=1"), ["options.k={'j': 1}", "options.k: input should be a valid integer"]),
        (("--set", "std_ddof.x=1"), ["std_ddof: input should be 0 or 1"]),
        (("--set", "options=token"), ["options='token'", "options: input should be a mapping of field names"]),
        (("--set", "options=null"), ["options: input should be a mapping of field names"]),
        (("--set", "options.gdpo_components=right"), ["options.gdpo_components: input should be a list, such as [a"]),
        (("--set", "options.gdpo_weights=[1, a]"), ["options.gdpo_weights.1='a'", "should be a valid number"]),
        (("--set", "options.pass_at_k=analytic"), ["EstimatorOptions\n", "pass_at_k='analytic' with k=None"]),
        (
            ("--set", "min_group_size=[1"),
            ["YAML in --set min_group_size\n", " but got '<stream end>' at line 1, column 3\n"],
        ),
        (("--set", "min_group_size=two"), ["min_group_size='two'", "valid integer"]),
        (("--set", "singleton=raw", "--set", "min_group_size=2"), ["groups of one are excluded"]),
        (("--set", "device=nowhere"), ["device 'nowhere'\n  got:      no such type of device\n", "cpu or cuda:0"]),
        (("--set", "device=meta"), ["device 'meta'\n  got:      Cannot copy out of meta tensor; no data!\n"]),
        (("--set", "device=hpu"), ["device 'hpu'\n"]),
        (("--config", "nowhere.yaml"), ["config file nowhere.yaml\n  got:      no such file\n"]),
        (("--set", "group_fallback=error", "--set", "group_key=nothing"), ["prompt groups\n", "no row has 'nothing'"]),
        (("--prompt-group-sizes", "1,a"), ["--prompt-group-sizes\n", "'1,a'"]),
        (("--prompt-group-sizes", "1,2"), ["2 sizes that sum to 3", "a sum of 58"]),
        (("--prompt-group-sizes", "-1,59"), ["-1 at position 0"]),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(run: Callable[..., Run], arguments: tuple[str, ...], texts: list[str]) -> None:
    refused = run("normalize", EXAMPLE, *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert [text for text in (*texts, "  remedy: ") if text not in refused.err] == []
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ([1, 2], ["2 sizes that sum to 3", "--prompt-group-sizes none ignores what the dump recorded"]),
        ([1, "2"], ["'2' at position 1"]),
        (7, ["a value of type int", "--prompt-group-sizes none"]),
    ],
    ids=str,
)
def test_sizes_of_the_dump_that_do_not_fit(
    run: Callable[..., Run], tmp_path: Path, sizes: Any, texts: list[str]
) -> None:
    path = tmp_path / "stale.pt"
    rows = [{"group_index": 0, "index": k, "reward": k, "response_length": 1} for k in range(2)]
    write_dump(RolloutDump(rows, 3, {"prompt_group_sizes": sizes}), path)
    refused = run("normalize", path)
    assert refused.code == 2
    assert [text for text in (f"prompt_group_sizes in the metadata of {path}", *texts) if text not in refused.err] == []
    assert run("normalize", path, "--prompt-group-sizes", "none").code == 0
