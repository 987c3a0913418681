"""The bias study: its exact gradient, its rows, its intervals, a short run, and the page that shows the long one."""

import importlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from miles_norm.errors import ConfigError, MissingDependencyError

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "examples/bias_study"
PAGE = (ROOT / "docs/bias_study.md").read_text(encoding="utf-8")
PUBLISHED = json.loads((ROOT / "docs/bias_study/results.json").read_text(encoding="utf-8"))
WHOLE = ("whole batch", "whole rollouts")
INVARIANT = ("rollout_mean / rollouts", "rollout_mean / nominal_rollouts", "token_mean", "constant")


@pytest.fixture(scope="module", name="study")
def fixture_study() -> Iterator[Any]:
    """The modules of the study; they name each other as a script's do."""
    names = [path.stem for path in STUDY.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module", name="short")
def fixture_short(study: Any) -> Any:
    return study.study.measure(study.study.Settings(rollouts=6_400))


def entries(results: Any, part: str, **wanted: Any) -> list[dict[str, Any]]:
    found = [e for e in results[part] if all(e[name] == value for name, value in wanted.items())]
    assert found
    return found


def every_rollout(prompt: int, race: Any) -> Iterator[tuple[float, int, float, list[float]]]:
    """Probability, tokens, reward and score of all rollouts of a prompt, in plain Python."""
    theta, kind = race.THETA.tolist(), prompt // 2
    difficulty = -1 + 3 * prompt / 7
    seen = set()
    for decisions in itertools.product((1, 0), repeat=9):
        right = wrong = mistake = tokens = 0
        probability, score, path = 1.0, [0.0] * 6, ()
        for decision in decisions:
            x = [float(kind == k) for k in range(4)] + [mistake, right / 4]
            p = 1 / (1 + math.exp(difficulty - sum(a * b for a, b in zip(theta, x, strict=True))))
            probability *= p if decision else 1 - p
            score = [s + (decision - p) * value for s, value in zip(score, x, strict=True)]
            right, wrong, mistake = right + decision, wrong + 1 - decision, 1 - decision
            tokens += 2 if decision else 6
            path += (decision,)
            if right == 4 or wrong == 6:
                break
        if path not in seen:
            seen.add(path)
            yield probability, tokens, float(right == 4), score


def test_exact_values_are_those_of_a_list_of_all_rollouts(study: Any) -> None:
    exact = study.race.exact()
    tokens, gradient = 0.0, torch.zeros(6, dtype=torch.float64)
    for prompt in range(8):
        every = list(every_rollout(prompt, study.race))
        assert sum(p for p, *_ in every) == pytest.approx(1, abs=1e-12)
        assert float(exact.success_rates[prompt]) == pytest.approx(sum(p * r for p, _, r, _ in every), rel=1e-12)
        tokens += sum(p * length for p, length, *_ in every) / 8
        gradient += sum(p * r * torch.tensor(score, dtype=torch.float64) for p, _, r, score in every) / 8
    assert exact.tokens == pytest.approx(tokens, rel=1e-12)
    torch.testing.assert_close(exact.gradient, gradient, rtol=1e-11, atol=1e-14)


def test_exact_gradient_is_that_of_finite_differences(study: Any) -> None:
    step = 1e-5
    for number, slope in enumerate(study.race.exact().gradient.tolist()):
        ends = []
        for sign in (1, -1):
            theta = study.race.THETA.clone()
            theta[number] += sign * step
            ends.append(study.race.exact(theta).success)
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-7)


def test_sampled_rollouts_are_those_of_the_policy(study: Any) -> None:
    draw, number = torch.Generator().manual_seed(0), 4_000
    rollouts = study.race.sample(torch.arange(8).repeat(number), draw)
    exact, score = study.race.exact(), rollouts.scores.sum(dim=1)
    # Means over independent rounds of all prompts: reward, tokens, score (whose mean is 0) and reward times score.
    values = torch.cat([rollouts.reward[:, None], rollouts.tokens[:, None], score, rollouts.reward[:, None] * score], 1)
    rounds = values.view(number, 8, -1).mean(dim=1)
    expected = torch.tensor([exact.success, exact.tokens, *[0.0] * 6, *exact.gradient], dtype=torch.float64)
    assert ((rounds.mean(dim=0) - expected).abs() < 4 * rounds.std(dim=0) / number**0.5).all()


def test_reported_shapes_have_the_reported_shares(study: Any) -> None:
    success = study.race.exact().success
    share = torch.tensor([1 - success, success], dtype=torch.float64)
    shapes = {name: shape(success) for name, shape in study.cutting.SHAPES.items()}
    for name, shape in shapes.items():
        torch.testing.assert_close(shape.sum(dim=1), torch.ones(2, dtype=torch.float64))
        assert (shape >= 0).all(), name
    means = {name: shape @ torch.arange(1.0, shape.shape[1] + 1).double() for name, shape in shapes.items()}
    for name in ("failures retry", "successes explore", "unrelated to outcome"):
        assert float(share @ shapes[name][:, 0]) == pytest.approx(0.36)
        assert float(share @ means[name]) == pytest.approx(2.41)
    assert means["failures retry"][0] > 2 * means["failures retry"][1]
    assert means["successes explore"][1] > 2 * means["successes explore"][0]


def test_cutting_keeps_tokens_and_scores(study: Any) -> None:
    draw, success = torch.Generator().manual_seed(1), study.race.exact().success
    rollouts = study.race.sample(torch.arange(8).repeat(500), draw)
    for name, shape in study.cutting.SHAPES.items():
        rows = study.cutting.cut(rollouts, shape(success), draw)
        assert (rows.tokens >= 1).all(), name
        assert torch.bincount(rows.rollout, weights=rows.tokens.double()).equal(rollouts.tokens.double())
        sums = torch.zeros(len(rollouts.reward), 6, dtype=torch.float64).index_add_(0, rows.rollout, rows.scores)
        torch.testing.assert_close(sums, rollouts.scores.sum(dim=1))


def test_a_rollout_cut_between_all_tokens_has_its_choices_where_decisions_begin(study: Any) -> None:
    # Four right decisions in two tokens each; with eight rows every token is one, and every second one is a choice.
    scores = torch.zeros(1, 9, 6, dtype=torch.float64)
    scores[0, :4, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    starts = torch.tensor([[0, 2, 4, 6, 0, 0, 0, 0, 0]])
    rollouts = study.race.Rollouts(torch.ones(1, dtype=torch.float64), torch.tensor([8]), scores, starts)
    eight = torch.tensor([[0.0] * 7 + [1.0]] * 2, dtype=torch.float64)
    rows = study.cutting.cut(rollouts, eight, torch.Generator().manual_seed(0))
    assert rows.tokens.tolist() == [1] * 8
    assert rows.scores[:, 0].tolist() == [1, 0, 2, 0, 3, 0, 4, 0]


def test_intervals(study: Any) -> None:
    Box = study.intervals.Box
    double = torch.float64
    # Means 3 and 4 with half widths 1 and 2: the nearest corner is (2, 2), the farthest (4, 6).
    box = Box(torch.tensor([3.0, 4.0], dtype=double), torch.tensor([0.5, 1.0], dtype=double), 2.0)
    length = box.length()
    assert (length.value, length.low, length.high) == pytest.approx((5, math.sqrt(8), math.sqrt(52)))
    assert not box.holds_zero
    assert box.largest_z == 6
    angle = box.angle()
    assert (angle.low, angle.high) == pytest.approx((math.degrees(math.atan2(2, 4)), math.degrees(math.atan2(6, 2))))
    # Half widths 3 and 4: both intervals reach 0.
    touching = Box(box.mean, torch.tensor([1.5, 2.0], dtype=double), 2.0)
    assert touching.holds_zero
    assert touching.length().low == 0
    nothing = Box.of(torch.zeros(5, 2, dtype=double), 4.0)
    assert nothing.holds_zero
    assert (nothing.largest_z, nothing.length().high) == (0, 0)
    # Quantiles of Student's t that tables have: 95% and, for a thousand tests, 99.995% with 100 degrees of freedom.
    assert study.intervals.critical_value(1, 101) == pytest.approx(1.9840, abs=1e-4)
    axes = study.intervals.axes_along(torch.tensor([3.0, 4.0, 0.0], dtype=double))
    torch.testing.assert_close(axes[:, 0], torch.tensor([0.6, 0.8, 0.0], dtype=double))
    torch.testing.assert_close(axes.T @ axes, torch.eye(3, dtype=double))


def test_intervals_hold_together_as_often_as_they_say(study: Any) -> None:
    draw, studies = torch.Generator().manual_seed(2), 2_000
    critical = study.intervals.critical_value(6, 50)
    values = torch.randn(studies, 50, 6, generator=draw, dtype=torch.float64)
    holding = sum(study.intervals.Box.of(each, critical).holds_zero for each in values)
    # 95%, with four standard errors of a share of 2,000.
    assert holding / studies == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / studies))


def test_gradients_are_those_of_the_equations(study: Any) -> None:
    """Two prompt groups of two rollouts, the first rollout in two rows; every estimator by its equation."""
    tokens, rollout = torch.tensor([2, 6, 4, 4, 8]), torch.tensor([0, 0, 1, 2, 3])
    scores = torch.arange(30, dtype=torch.float64).view(5, 6)
    rows = study.cutting.Rows(rollout, tokens, scores)
    batches = study.estimators.Batches(
        torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64), rows, 4, 2
    )
    found = {
        (e.plan, e.advantage, e.estimator.name): e.gradients
        for e in study.estimators.gradients(batches, 10.0, torch.Generator().manual_seed(0))
    }
    # dr_grpo: reward minus the mean of the two rollouts; over rows the first group has mean 2/3, the second 1/2.
    a, by_rows = [0.5, 0.5, -0.5, 0.5, -0.5], [1 / 3, 1 / 3, -2 / 3, 0.5, -0.5]
    weights = {  # times 10, the expected tokens, or 42, the constant; 5 rows, 4 rollouts, 24 tokens
        "sample_mean": ([10 / 5 / n for n in (2, 6, 4, 4, 8)], a),
        "row advantages, sample_mean": ([10 / 5 / n for n in (2, 6, 4, 4, 8)], by_rows),
        "row advantages, token_mean": ([10 / 24] * 5, by_rows),
        "rollout_row_mean": ([10 / 4 / n for n in (2 * 2, 2 * 6, 4, 4, 8)], a),
        "rollout_mean / trained_rows": ([10 / 5 / n for n in (8, 8, 4, 4, 8)], a),
        "rollout_mean / rollouts": ([10 / 4 / n for n in (8, 8, 4, 4, 8)], a),
        "rollout_mean / nominal_rollouts": ([10 / 4 / n for n in (8, 8, 4, 4, 8)], a),
        "token_mean": ([10 / 24] * 5, a),
        "constant": ([42 / 42 / 4] * 5, a),
    }
    assert {estimator.name for estimator in study.estimators.ESTIMATORS} == set(weights)
    for name, (weight, advantage) in weights.items():
        expected = sum(w * x * s for w, x, s in zip(weight, advantage, scores, strict=True))
        torch.testing.assert_close(found["whole batch", "dr_grpo", name], expected[None], rtol=1e-6, atol=1e-6)
    # Updates of two rollouts: rows 0 to 2 and rows 3 and 4, with 12 tokens each; the mean of two updates.
    halves = sum(w * x * s for w, x, s in zip([10 / 12 / 2] * 5, a, scores, strict=True))
    torch.testing.assert_close(found["whole rollouts", "dr_grpo", "token_mean"], halves[None], rtol=1e-6, atol=1e-6)


def test_updates_of_rows_are_those_of_rollouts_where_nothing_is_cut(short: Any) -> None:
    for advantage in ("grpo", "dr_grpo", "rloo"):
        for name in ("rollout_mean / rollouts", "sample_mean", "constant"):
            wanted = {"shape": "no cut", "advantage": advantage, "estimator": name}
            [by_rows], [by_rollouts] = (entries(short, "gradient", plan=plan, **wanted) for plan in ("rows", WHOLE[1]))
            assert by_rows["mean"] == pytest.approx(by_rollouts["mean"], abs=1e-12)


def test_short_run_finds_what_is_large(short: Any) -> None:
    for plan in WHOLE:
        for name in INVARIANT:
            assert all(e["identical"] for e in entries(short, "cutting", plan=plan, estimator=name))
        for name in ("sample_mean", "rollout_mean / trained_rows"):
            found = entries(short, "cutting", plan=plan, estimator=name, shape="successes explore")
            assert not any(e["holds_zero"] for e in found)
    assert all(
        e["holds_zero"] for e in entries(short, "gradient", plan=WHOLE[0], advantage="rloo", estimator="constant")
    )
    for e in short["shapes"]:
        assert e["sampled_rows"] == pytest.approx(e["rows"][2], rel=0.05)


def test_bias_of_the_random_denominator_is_the_difference_of_both_biases(short: Any) -> None:
    for plan, found in zip(WHOLE, short["random_denominator"], strict=True):
        tokens, constant = (
            entries(short, "gradient", shape="no cut", plan=plan, advantage="rloo", estimator=name)[0]["mean"]
            for name in ("token_mean", "constant")
        )
        assert found["bias"][0] / 100 == pytest.approx(math.dist(tokens, constant), rel=1e-9)


def test_rloo_is_dr_grpo_times_n_by_n_minus_1(short: Any) -> None:
    gradient = torch.tensor(short["exact"]["gradient"], dtype=torch.float64)
    unit = gradient / gradient.norm()
    for name in ("constant", "rollout_mean / rollouts"):
        wanted = {"shape": "heavy tail", "plan": WHOLE[1], "estimator": name}
        rloo, dr_grpo = (
            torch.tensor(entries(short, "gradient", advantage=a, **wanted)[0]["mean"], dtype=torch.float64) + unit
            for a in ("rloo", "dr_grpo")
        )
        torch.testing.assert_close(rloo, dr_grpo * 8 / 7, rtol=1e-6, atol=1e-7)


@pytest.fixture(name="command")
def fixture_command(study: Any) -> typer.Typer:
    app = typer.Typer()
    app.command()(study.run.main)
    return app


def test_command_writes_results_that_are_the_same_each_time(command: typer.Typer, study: Any, tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        arguments = ["--rollouts", "3200", "--seed", "3", "--no-plots", "-o", str(tmp_path / name)]
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == 0, done.output
        assert "rollout_mean / rollouts | identical | identical |" in done.output
        texts.append((tmp_path / name / "results.json").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    results = json.loads(texts[0])
    assert results["settings"]["batches"] == 50
    assert study.report.report(results) in (tmp_path / "first" / "table.md").read_text(encoding="utf-8")


def test_number_of_rollouts_that_does_not_fit(command: typer.Typer, study: Any, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--rollouts", "100000", "-o", str(tmp_path), "--no-plots"])
    assert done.exit_code == 2
    assert "expected: a multiple of 64, 3200 or more" in done.output
    assert "for example 99968" in done.output
    with pytest.raises(ConfigError, match="for example 3200"):
        study.study.Settings(rollouts=64)


def test_pictures_without_matplotlib_are_refused_before_the_work(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="the plots of the study") as error:
        study.plots.pyplot()
    assert "--no-plots" in str(error.value)


def test_page_shows_the_published_results(study: Any) -> None:
    report = study.report
    for table in (
        report.shapes(PUBLISHED),
        report.cutting_verdicts(PUBLISHED),
        report.cutting(PUBLISHED, "whole batch", "grpo"),
        report.cutting_by_plan(PUBLISHED, "failures retry", "grpo"),
        report.gradient_verdicts(PUBLISHED),
        report.gradient(PUBLISHED, "failures retry", "whole batch"),
        report.random_denominator(PUBLISHED),
    ):
        assert table in PAGE
    settings = PUBLISHED["settings"]
    assert f"--rollouts {settings['rollouts']} --seed {settings['seed']}" in PAGE
    assert f"{settings['batches']:,} independent batches" in PAGE


def test_what_the_page_says_of_cutting() -> None:
    assert PUBLISHED["settings"]["rollouts"] >= 100_000
    for plan in WHOLE:
        for name in INVARIANT:
            assert all(
                e["identical"] and e["holds_zero"] for e in entries(PUBLISHED, "cutting", plan=plan, estimator=name)
            )
    for name in ("sample_mean", "row advantages, sample_mean", "rollout_row_mean", "rollout_mean / trained_rows"):
        assert not any(e["holds_zero"] for e in entries(PUBLISHED, "cutting", estimator=name))
    advantages = entries(PUBLISHED, "cutting", estimator="row advantages, token_mean")
    assert {(e["shape"], e["plan"], e["advantage"]) for e in advantages if e["holds_zero"]} == {
        ("unrelated to outcome", plan, "dr_grpo") for plan in WHOLE
    }
    assert not any(e["holds_zero"] for e in entries(PUBLISHED, "cutting", plan="rows"))
    for advantage, sign in (("grpo", 1), ("rloo", -1)):  # both together less than either alone, or more
        wanted = {"shape": "failures retry", "plan": WHOLE[0], "advantage": advantage}
        both, rows, means = (
            entries(PUBLISHED, "cutting", estimator=name, **wanted)[0]["difference"]
            for name in ("row advantages, sample_mean", "row advantages, token_mean", "sample_mean")
        )
        assert all(both[2] < each[1] if sign > 0 else both[1] > each[2] for each in (rows, means))


def test_what_the_page_says_of_the_true_gradient() -> None:
    unbiased = entries(PUBLISHED, "gradient", advantage="rloo", estimator="constant")
    assert all(e["holds_zero"] for e in unbiased if e["plan"] in WHOLE)
    for plan in WHOLE:
        [own] = entries(PUBLISHED, "gradient", shape="no cut", plan=plan, advantage="dr_grpo", estimator="constant")
        assert own["along"][1] < 7 / 8 < own["along"][2] < 1  # shrunk by 1/8
        assert own["angle"][1] == 0
        for e in entries(PUBLISHED, "gradient", plan=plan, estimator="rollout_mean / rollouts"):
            assert not e["holds_zero"]
            assert 5 < e["angle"][0] < 6
            assert 3.5 < e["angle"][1] < e["angle"][2] < 7.5
        [scaled] = entries(PUBLISHED, "gradient", shape="no cut", plan=plan, advantage="grpo", estimator="constant")
        assert scaled["along"][1] > 1
        assert scaled["angle"][1] > 0
    many, few = PUBLISHED["random_denominator"]
    assert (many["rollouts"], few["rollouts"]) == (64, 16)
    assert not many["holds_zero"]
    assert few["bias"][0] > 2 * many["bias"][0]
    cosines = [e["cosine"][0] for e in PUBLISHED["gradient"]]
    assert f"is {min(cosines):.2f} to {max(cosines):.2f} here" in PAGE


def test_pictures_are_there_and_show_every_estimator(study: Any) -> None:
    for name in ("cutting", "gradient"):
        picture = (ROOT / f"docs/bias_study/{name}.svg").read_text(encoding="utf-8")
        assert f"](bias_study/{name}.svg)" in PAGE
        shown = [estimator.name for estimator in study.estimators.ESTIMATORS] + list(study.estimators.ADVANTAGES)
        assert [label for label in shown if label not in picture] == []
