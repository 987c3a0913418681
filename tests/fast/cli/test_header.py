"""The lines above the table: every estimator in symbols, whitening, and the settings that were changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import EXAMPLE, Run

from miles_norm.advantages import ESTIMATORS
from miles_norm.config import PASS_THROUGH_ESTIMATORS

PASS_AT_2 = (
    "(p_own - p) / sqrt(p * (1 - p)), where p is the share of all draws of 2 from the n rollouts that hold a right "
    "one, and p_own that of the draws with this rollout"
)
DEFINITIONS = [
    ("grpo", [], "(reward - mean) / (std + 1e-06)"),
    ("grpo", ["grpo_std_normalization=false"], "reward - mean"),
    ("gspo", ["std_epsilon=1e-4"], "(reward - mean) / (std + 0.0001)"),
    ("dr_grpo", [], "reward - mean"),
    ("reinforce_plus_plus_baseline", [], "reward - mean"),
    ("rloo", [], "(reward - mean) * n / (n - 1)"),
    ("opo", [], "reward - (mean weighted by trainable tokens)"),
    ("maxrl", [], "(reward - mean) / mean"),
    ("pass_at_k", [], "best reward - second best for the one best rollout, 0 for all others"),
    (
        "pass_at_k",
        ["options.pass_at_k=analytic", "options.k=2"],
        PASS_AT_2,
    ),
    (
        "gdpo",
        ["options.gdpo_components=[right, short]", "options.gdpo_weights=[1, 0.5]"],
        "(1 * z(right) + 0.5 * z(short)) / (std over the batch + 1e-06), where z = (reward - mean) / (std + 1e-06)",
    ),
]


@pytest.fixture(name="dump")
def fixture_dump(jsonl: Callable[..., Path]) -> Callable[[str], Path]:
    """Two prompts with four rollouts each; rewards are 0 and 1, for ``gdpo`` dicts."""

    def dump(estimator: str) -> Path:
        rows = [(group, group * 4 + k, float(k == group or k == 3 * group)) for group in range(2) for k in range(4)]
        given = {
            name: {"right": reward, "short": name / 8} if estimator == "gdpo" else reward for _, name, reward in rows
        }
        return jsonl(*({"group_index": group, "rollout_id": name, "reward": given[name]} for group, name, _ in rows))

    return dump


def settings(estimator: str, *more: str) -> list[str]:
    return [part for text in (f"advantage_estimator={estimator}", *more) for part in ("--set", text)]


def test_every_estimator_is_tested() -> None:
    assert {name for name, _, _ in DEFINITIONS} == ESTIMATORS.keys()


@pytest.mark.parametrize(("estimator", "more", "definition"), DEFINITIONS)
def test_the_advantage_in_symbols(
    run: Callable[..., Run], dump: Callable[[str], Path], estimator: str, more: list[str], definition: str
) -> None:
    shown = run("normalize", dump(estimator), *settings(estimator, *more))
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[2] == f"{estimator}: advantage = {definition}"


@pytest.mark.parametrize("whitening", ["none", "rollout", "token"])
@pytest.mark.parametrize("shift", ["false", "true"])
@pytest.mark.parametrize(("estimator", "more", "definition"), DEFINITIONS)
def test_every_estimator_with_every_whitening(
    run: Callable[..., Run],
    dump: Callable[[str], Path],
    estimator: str,
    more: list[str],
    definition: str,
    whitening: str,
    shift: str,
) -> None:
    whitens = [f"options.whitening={whitening}", *([f"options.whitening_shift={shift}"] if whitening != "none" else [])]
    path = dump(estimator)
    shown = run("normalize", path, *settings(estimator, *more, *whitens))
    assert (shown.code, shown.err) == (0, "")
    assert definition in shown.lines[2]
    assert shown.lines[3].startswith("then whitened: ") == (whitening != "none")
    assert "{" not in shown.lines[2] + shown.lines[3]
    # What is explained has the same arithmetic to write down.
    for row in range(8):
        assert run("explain", path, "--row", row, *settings(estimator, *more, *whitens)).code == 0


def test_whitening_by_hand(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    # dr_grpo on 0, 1, 2 and 0, 4, 8: advantages -1, 0, 1, -4, 0, 4; squares 34 in sum, std (34 / 5)**0.5 = 2.6077
    rewards = (0, 1, 2, 0, 4, 8)
    path = jsonl(*({"group_index": k // 3, "rollout_id": k, "reward": reward} for k, reward in enumerate(rewards)))
    whitened = settings("dr_grpo", "options.whitening=rollout")
    shown = run("normalize", path, *whitened)
    assert shown.lines[3] == "then whitened: advantage / (batch std + 1e-06); each rollout weighs 1, std 2.6077"
    assert shown.lines[9].split()[-2:] == ["-1.5339", "1.5339"]
    shown = run("normalize", path, *settings("dr_grpo", "options={whitening: token, whitening_shift: true}"))
    assert shown.lines[3].startswith("then whitened: (advantage - batch mean) / (batch std + 1e-06); ")
    assert "each rollout weighs its trainable tokens, mean 0, std " in shown.lines[3]


def test_whitening_without_a_scale(run: Callable[..., Run], jsonl: Callable[..., Path]) -> None:
    path = jsonl(*({"group_index": 0, "rollout_id": k, "reward": 1} for k in range(2)))
    shown = run("normalize", path, "--set", "options.whitening=rollout")
    assert shown.lines[3].endswith("nothing is changed")


@pytest.mark.parametrize("estimator", sorted(PASS_THROUGH_ESTIMATORS))
def test_estimators_that_pass_rewards_through(run: Callable[..., Run], estimator: str) -> None:
    shown = run("normalize", EXAMPLE, *settings(estimator))
    assert shown.lines[2] == f"{estimator}: rows keep their own rewards"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["options.whitening=rollout"], "options.whitening=rollout"),
        (["options={}"], None),
        (["std_epsilon=1e-4", "grpo_std_normalization=false"], "grpo_std_normalization=false, std_epsilon=0.0001"),
        (["n_samples_per_prompt=4", "group_key=group_index"], "n_samples_per_prompt=4"),
        (
            ["advantage_estimator=pass_at_k", "options.pass_at_k=topk_gap", "options.whitening=token"],
            "options.whitening=token",
        ),
    ],
)
def test_only_what_differs_is_shown_as_it_is_set(run: Callable[..., Run], given: list[str], text: str | None) -> None:
    shown = run("normalize", EXAMPLE, *(part for setting in given for part in ("--set", setting)))
    changed = [line for line in shown.lines if line.startswith("not at their defaults: ")]
    assert changed == ([f"not at their defaults: {text}"] if text else [])


def test_lists_are_shown_as_they_are_set(run: Callable[..., Run], dump: Callable[[str], Path]) -> None:
    more = ["options.gdpo_components=[right, short]", "options.gdpo_weights=[1, 0.5]"]
    shown = run("normalize", dump("gdpo"), *settings("gdpo", *more))
    assert shown.lines[3] == f"not at their defaults: {', '.join(more)}"
