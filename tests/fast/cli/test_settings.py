"""``config``, ``--config``, ``--set`` and ``--prompt-group-sizes``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, Run

from miles_norm import NormalizationConfig, RolloutDump, write_dump


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


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--set", "advantage_estimater=rloo"), ["did you mean 'advantage_estimator'?"]),
        (("--set", "rloo"), ["--set rloo\n", "no key=value"]),
        (("--set", "=1"), ["no key=value"]),
        (("--set", "min_group_size=[1"), ["YAML in --set min_group_size"]),
        (("--set", "min_group_size=two"), ["min_group_size='two'", "valid integer"]),
        (("--set", "singleton=raw", "--set", "min_group_size=2"), ["groups of one are excluded"]),
        (("--set", "device=nowhere"), ["device 'nowhere'", "cpu or cuda:0"]),
        (("--config", "nowhere.yaml"), ["config file nowhere.yaml", "No such file"]),
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
