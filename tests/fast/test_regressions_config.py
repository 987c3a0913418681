"""Settings where they once went wrong: numbers beyond all counts, YAML that runs away, files that are none."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_norm import LossConfig, NormalizationConfig, UpdateConfig
from miles_norm.config import EstimatorOptions, FilterConfig, parse_yaml
from miles_norm.errors import ConfigError


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fail instead of running on, and instead of eating the machine's memory."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError("more than 3 s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "number", [10**30, 2**62, 2**63, -(10**30), 2**31], ids=["10**30", "2**62", "2**63", "-10**30", "2**31"]
)
@pytest.mark.parametrize(
    ("model", "name", "fields"),
    [
        (NormalizationConfig, "min_group_size", {}),
        (NormalizationConfig, "n_samples_per_prompt", {}),
        (NormalizationConfig, "rollout_batch_size", {}),
        (EstimatorOptions, "k", {"pass_at_k": "analytic"}),
        (LossConfig, "max_tokens", {"aggregation": "constant"}),
        (LossConfig, "nominal_rollouts", {"divisor": "nominal_rollouts"}),
    ],
)
def test_numbers_beyond_all_counts(model: Any, name: str, fields: dict[str, Any], number: int) -> None:
    with pytest.raises(ConfigError, match=name):
        model(**fields, **{name: number})
    assert getattr(model(**fields, **{name: 2**31 - 1}), name) == 2**31 - 1


@pytest.mark.parametrize("model", [NormalizationConfig, EstimatorOptions, LossConfig, UpdateConfig, FilterConfig])
def test_a_field_named_self_is_an_unknown_field(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="self: no such field"):
        model(self=1)
    (tmp_path / "c.yaml").write_text("self: 1\n")
    with pytest.raises(ConfigError, match="self: no such field"):
        model.from_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "text",
    [
        '!!int ""',
        '!!float ""',
        "!!bool maybe",
        '!!timestamp "x"',
        "k: !!int ''",
        "? !!int ''\n: 1",
        "!!int x",
        "!!float x",
        "!!binary 'é'",
        "!!timestamp 2000-13-41",
        "2000-13-41",
        "!!set [1]",
        "!!omap 1",
        "!!null x y",
        "? [1]\n: 2",
        "? {a: 1}\n: 2",
        "<<: 1",
        "!!python/object/apply:os.getcwd []",
    ],
)
@pytest.mark.usefixtures("bounded")
def test_yaml_that_cannot_be_constructed(text: str) -> None:
    if text == "!!null x y":  # a null whatever it says
        assert parse_yaml(text, "example") is None
        return
    with pytest.raises(ConfigError, match=r"^YAML in example\n"):
        parse_yaml(text, "example")


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(20)
)
MERGE_BOMB = "a: &a {k: 1}\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{', '.join(['*' + chr(97 + n)] * 9)}]}}\n" for n in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        "a: &x 1\nb: *x",
        "&x [*x]",
        "&x {a: *x}",
        "a: &x {k: 1}\nb: {<<: *x}",
        "- &x 1\n- *x",
        "? &x a\n: *x",
        BOMB,
        MERGE_BOMB,
    ],
    ids=["scalar", "list in itself", "mapping in itself", "merge", "item", "key", "bomb", "merge bomb"],
)
@pytest.mark.usefixtures("bounded")
def test_aliases_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="alias"):
        parse_yaml(text, "example")


def test_an_anchor_alone_is_no_alias() -> None:
    assert parse_yaml("a: &x 1e-6\nb: '*x'\n", "example") == {"a": 1e-6, "b": "*x"}


def test_a_mapping_of_many_keys_is_read_in_linear_time() -> None:
    keys = 20_000
    text = "\n".join(f"k{number}: 1" for number in range(keys))
    start = time.process_time()
    assert len(parse_yaml(text, "example")) == keys
    assert time.process_time() - start < 4  # under a second; comparing all pairs of keys takes several


def test_keys_given_twice_are_named() -> None:
    with pytest.raises(ConfigError, match="keys given twice: a, b"):
        parse_yaml("b: 1\na: 1\nc: 1\nb: 2\na: 3\n", "example")


class TestFilesThatAreNone:
    @pytest.mark.usefixtures("bounded")
    def test_a_fifo(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo.yaml")
        with pytest.raises(ConfigError, match=r"^config file .*fifo\.yaml\n"):
            NormalizationConfig.from_yaml(tmp_path / "fifo.yaml")

    @pytest.mark.usefixtures("bounded")
    @pytest.mark.parametrize(
        "path", ["/dev/zero", "/dev/null", "a\0b", "\0", "", ".", "/proc/self/nothing", "x" * 5000]
    )
    def test_what_is_no_config(self, path: str) -> None:
        with pytest.raises(ConfigError, match=r"^config file "):
            NormalizationConfig.from_yaml(path)

    @pytest.mark.usefixtures("bounded")
    def test_a_file_of_gigabytes(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").touch()
        os.truncate(tmp_path / "c.yaml", 2**32)  # a hole, which takes no room on the disk
        with pytest.raises(ConfigError, match=r"^config file .*c\.yaml\n"):
            NormalizationConfig.from_yaml(tmp_path / "c.yaml")
