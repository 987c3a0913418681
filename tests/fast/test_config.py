"""Settings: what is rejected and in which words, and the way through YAML and back."""

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from batches import configs
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from miles_norm import NormalizationConfig, UpdateConfig, read_dump
from miles_norm.advantages import ESTIMATORS as REGISTRY
from miles_norm.config import PASS_THROUGH_ESTIMATORS, AdvantageEstimator, EstimatorOptions, parse_yaml
from miles_norm.errors import ConfigError, MissingDependencyError
from miles_norm.normalize import normalize_rewards

ESTIMATORS = get_args(AdvantageEstimator)
ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def with_estimator(name: str, **fields: Any) -> NormalizationConfig:
    """The smallest config of an estimator: one of components must be told which."""
    options = {"gdpo_components": ["right"]} if name == "gdpo" else {}
    return NormalizationConfig(advantage_estimator=name, options=options, **fields)  # type: ignore[arg-type]


def test_defaults() -> None:
    assert NormalizationConfig().model_dump() == {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "std_ddof": 1,
        "std_epsilon": 1e-6,
        "zero_std_tolerance": 0.0,
        "singleton": "zero",
        "rollout_reward": "mainstream",
        "shared_reward_tolerance": 0.0,
        "reward_key": None,
        "missing_reward": "error",
        "untrained_rollouts": "include",
        "truncated_rollouts": "include",
        "zero_variance_groups": "keep",
        "min_group_size": 1,
        "group_key": "group_index",
        "group_fallback": "single_group",
        "coerce_numeric_strings": False,
        "n_samples_per_prompt": None,
        "rollout_batch_size": None,
        "device": None,
        "options": EstimatorOptions().model_dump(),
    }


def test_every_field_is_documented() -> None:
    assert [name for name, field in NormalizationConfig.model_fields.items() if not field.description] == []


def test_every_estimator_is_registered_or_passes_through() -> None:
    assert set(ESTIMATORS) == REGISTRY.keys() | PASS_THROUGH_ESTIMATORS
    assert not REGISTRY.keys() & PASS_THROUGH_ESTIMATORS


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"advantage_estimator": "gae"}, r"got: +advantage_estimator='gae'\n +expected: .*'grpo', 'gspo', .* or "),
        ({"advantage_estimater": "grpo"}, r"no such field \(did you mean 'advantage_estimator'\?\)"),
        ({"xyz": 1}, r"expected: xyz: no such field\n"),
        ({"advantage_estimator": None}, r"got: +advantage_estimator=None\n"),
        ({"rewards_normalization": 1}, r"rewards_normalization: input should be a valid boolean"),
        ({"grpo_std_normalization": "true"}, r"grpo_std_normalization: input should be a valid boolean"),
        ({"std_ddof": 2}, r"std_ddof: input should be 0 or 1"),
        ({"std_epsilon": -1e-6}, r"std_epsilon: input should be greater than or equal to 0"),
        ({"std_epsilon": "1e-6"}, r"std_epsilon: input should be a valid number"),
        ({"std_epsilon": math.nan}, r"std_epsilon: input should be a finite number"),
        ({"std_epsilon": math.inf}, r"std_epsilon: input should be a finite number"),
        ({"zero_std_tolerance": -0.1}, r"zero_std_tolerance: input should be greater than or equal to 0"),
        ({"zero_std_tolerance": 1.0}, r"zero_std_tolerance: input should be less than 1"),
        ({"singleton": "keep"}, r"singleton: input should be 'zero', 'raw' or 'error'"),
        ({"rollout_reward": "min"}, r"rollout_reward: input should be 'mainstream', 'shared', .*'mean' or 'sum'"),
        (
            {"rollout_reward": "shared", "shared_reward_tolerance": 1.0},
            r"shared_reward_tolerance: input should be less",
        ),
        ({"reward_key": 3}, r"reward_key: input should be a valid string"),
        ({"missing_reward": "raise"}, r"missing_reward: input should be 'error', 'exclude' or 'zero'"),
        ({"untrained_rollouts": "drop"}, r"untrained_rollouts: input should be 'include' or 'exclude'"),
        ({"truncated_rollouts": "drop"}, r"truncated_rollouts: input should be 'include' or 'untrain'"),
        ({"zero_variance_groups": "drop"}, r"zero_variance_groups: input should be 'keep' or 'drop_from_loss'"),
        ({"min_group_size": 0}, r"min_group_size: input should be greater than or equal to 1"),
        ({"min_group_size": 2.0}, r"min_group_size: input should be a valid integer"),
        ({"group_key": ""}, r"group_key: string should have at least 1 character"),
        ({"group_fallback": "raise"}, r"group_fallback: input should be 'single_group' or 'error'"),
        ({"coerce_numeric_strings": "no"}, r"coerce_numeric_strings: input should be a valid boolean"),
        ({"n_samples_per_prompt": 0}, r"n_samples_per_prompt: input should be greater than or equal to 1"),
        ({"n_samples_per_prompt": True}, r"n_samples_per_prompt: input should be a valid integer"),
        ({"rollout_batch_size": -1}, r"rollout_batch_size: input should be greater than or equal to 1"),
        ({"device": 0}, r"device: input should be a valid string"),
    ],
)
def test_what_does_not_fit(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)NormalizationConfig\n.*{text}"):
        NormalizationConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"shared_reward_tolerance": 0.1},
            r"got: +shared_reward_tolerance=0.1 with rollout_reward='mainstream'\n.*\n +reason: .* 'shared' only",
        ),
        (
            {"singleton": "raw", "advantage_estimator": "ppo"},
            r"got: +singleton='raw' with 'ppo'\n.*\n +reason: +rows keep their own rewards",
        ),
        (
            {"singleton": "error", "rewards_normalization": False},
            r"got: +singleton='error' with rewards_normalization=False\n",
        ),
        (
            {"singleton": "raw", "min_group_size": 2},
            r"got: +singleton='raw' with min_group_size=2\n.*\n +reason: +groups of one are excluded before",
        ),
        (
            {"min_group_size": 5, "n_samples_per_prompt": 4},
            r"got: +min_group_size=5 with n_samples_per_prompt=4\n.*\n +reason: .*every group would be excluded",
        ),
    ],
)
def test_contradictions(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("'shared' only", "rollout_reward='shared' only")):
        NormalizationConfig(**fields)


def test_a_flag_that_an_estimator_does_not_read_is_no_contradiction() -> None:
    for estimator in ESTIMATORS:
        assert not with_estimator(estimator, grpo_std_normalization=False).grpo_std_normalization


def test_every_problem_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got: +std_epsilon=-1, min_group_size=0\n +expected: std_epsilon: .*; min_"):
        NormalizationConfig(std_epsilon=-1, min_group_size=0)


def test_the_remedy_says_where_the_fields_are() -> None:
    with pytest.raises(
        ConfigError, match=r"remedy: +correct or remove what is named above; `miles-norm config` prints"
    ):
        NormalizationConfig(singelton="raw")
    with pytest.raises(
        ConfigError, match=r"remedy: +correct or remove what is named above; fields: unit, rollouts_per"
    ):
        UpdateConfig(left_over="drop")


def test_nested_settings_are_named_from_the_outermost_model() -> None:
    with pytest.raises(ConfigError, match=r"NormalizationConfig\n +got: .*options.k=0") as raised:
        NormalizationConfig(std_ddof=2, options={"k": 0})  # type: ignore[arg-type]
    assert "std_ddof=2" in raised.value.got
    assert "options.k: input should be greater than or equal to 1" in raised.value.expected
    with pytest.raises(ConfigError, match=r"EstimatorOptions\n +got: +k=0\n"):
        EstimatorOptions(k=0)


def test_every_field_with_choices_lists_them() -> None:
    text = UpdateConfig().to_yaml(comments=True)
    assert "# One of: smaller_update, drop, carry.\nleftover: smaller_update\n" in text
    assert text.count("# One of: ") == 3


def test_frozen() -> None:
    config = NormalizationConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.std_epsilon = 0.0  # type: ignore[misc]
    assert config == NormalizationConfig()
    assert hash(config) == hash(NormalizationConfig())


def test_normalizes_groups() -> None:
    normalizing = [name for name in ESTIMATORS if with_estimator(name).normalizes_groups]
    assert set(normalizing) == REGISTRY.keys()
    assert not NormalizationConfig(rewards_normalization=False).normalizes_groups


@pytest.mark.parametrize("comments", [False, True])
@settings(max_examples=25)
@given(config=configs(), text=st.text(min_size=1, max_size=8))
def test_yaml_round_trip(tmp_path_factory: pytest.TempPathFactory, comments: bool, config: Any, text: str) -> None:
    config = NormalizationConfig(**config.model_dump() | {"group_key": text, "reward_key": text})
    path = tmp_path_factory.getbasetemp() / f"round_trip_{comments}.yaml"
    path.write_text(config.to_yaml(comments=comments), encoding="utf-8")
    assert NormalizationConfig.from_yaml(path) == config


@pytest.mark.parametrize("key", ["1e-6", "1e5", "null", "true", "~", "0x1F", "12:30", "- a", "a: b", "#", "é", "1_000"])
def test_strings_that_look_like_something_else(key: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(NormalizationConfig(reward_key=key).to_yaml(), encoding="utf-8")
    assert NormalizationConfig.from_yaml(str(path)).reward_key == key


def test_resolved_yaml_names_and_explains_every_field() -> None:
    lines = NormalizationConfig().to_yaml(comments=True).splitlines()
    for name in NormalizationConfig.model_fields:
        [at] = [number for number, line in enumerate(lines) if line.startswith(f"{name}:")]
        assert lines[at - 1].startswith("# "), name


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E3", 1000.0), ("-2e+3", -2000.0), ("1.5e-3", 0.0015), ("1.e2", 100.0), ("0.5", 0.5), ("7", 7)],
)
def test_numbers_in_yaml(text: str, value: float) -> None:
    """YAML 1.1 reads 1e-6 as a string."""
    assert parse_yaml(f"x: {text}", "test") == {"x": value}


@pytest.mark.parametrize("text", ["e1", "1e", "x1e-6", "1e-6x", "'1e-6'"])
def test_strings_in_yaml(text: str) -> None:
    assert parse_yaml(f"x: {text}", "test") == {"x": text.strip("'")}


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("std_epsilon: 1\nstd_epsilon: 2\n", r"YAML in .*bad.yaml\n +got: +keys given twice: std_epsilon .*line 1"),
        ("a: [1, 2\n", r"YAML in .*bad.yaml\n +got: .*line 2"),
        ("a: b: c\n", r"got: +mapping values are not allowed"),
        ("!!python/object/apply:os.system ['true']\n", r"got: +could not determine a constructor"),
        ("- grpo\n", r"config file .*bad.yaml\n +got: +list\n"),
        ("grpo\n", r"got: +str\n"),
        ("", r"got: +an empty file\n"),
        ("# nothing\n", r"got: +an empty file\n"),
        ("std_epsilon: 1e-6x\n", r"std_epsilon: input should be a valid number"),
        ("advantage_estimater: grpo\n", r"did you mean 'advantage_estimator'"),
        ("1: 2\n", r"1: no such field"),
        ("d: 2001-13-45\n", r"YAML in .*bad.yaml"),
        ("[" * 1200, r"YAML in .*bad.yaml"),
        ("? [a, b]\n: 1\n? [a, b]\n: 2\n", r"YAML in .*bad.yaml|no such field"),
    ],
)
def test_bad_yaml(text: str, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=pattern):
        NormalizationConfig.from_yaml(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*none.yaml\n +got: +no such file\n"):
        NormalizationConfig.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"config file .*\n +got: +Is a directory\n"):
        NormalizationConfig.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("reward_key: \xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.yaml\n +got: .*utf-8"):
        NormalizationConfig.from_yaml(tmp_path / "latin.yaml")


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'miles-norm\[yaml\]'"):
        NormalizationConfig().to_yaml()


def test_the_shipped_configs() -> None:
    names = ["dr_grpo", "grpo", "gspo", "multi_lora", "reinforce_plus_plus_baseline", "strict"]
    assert {path.stem for path in CONFIGS} >= set(names)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config(path: Path) -> None:
    """Each loads, says why every line is there, and works on a real dump."""
    config = NormalizationConfig.from_yaml(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    blocks = "\n".join(lines).split("\n\n")
    assert [block for block in blocks if not block.startswith("#") and block != "advantage_estimator: " + (
        config.advantage_estimator)] == []  # fmt: skip
    assert config.advantage_estimator == (path.stem if path.stem in ESTIMATORS else "grpo")
    rewards = {"gdpo": lambda r: {"correct": r, "format": 1.0}, "pass_at_k": lambda r: float(r > 0.5)}.get(path.stem)
    dump = "miles_multi_lora.pt" if path.stem == "multi_lora" else "slime_dump.pt"
    samples = read_dump(ROOT / "tests" / "fast" / "data" / dump).samples
    if rewards is not None:
        samples = [sample | {"reward": rewards(sample["reward"])} for sample in samples]
    result = normalize_rewards(samples, config)
    assert result.counted_rollouts.all()


def test_strict_refuses() -> None:
    strict = NormalizationConfig.from_yaml(ROOT / "configs" / "strict.yaml")
    assert (strict.group_fallback, strict.missing_reward) == ("error", "error")
    assert (strict.rollout_reward, strict.singleton) == ("shared", "error")
