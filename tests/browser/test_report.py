"""The report of an audit in a real browser: sorted, searched, opened down to a row, in both themes and on a phone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import EXAMPLE, MAINSTREAM
from page_checks import HOSTILE, OUTSIDE, SMALL

from miles_norm import RolloutDump, read_dump, write_dump
from miles_norm.cli import main

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", name="reports")
def fixture_reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One report per dump, one of a run of five steps, and one of a dump with hostile ids."""
    folder = tmp_path_factory.mktemp("reports")
    steps = []
    for number in range(5):
        rows = read_dump(EXAMPLE).samples
        for row in rows:
            row["reward"] = row["reward"] if row["rollout_id"] != number else 1.0
        steps.append(folder / f"rollout_{number}.pt")
        write_dump(RolloutDump(rows, number, {}), steps[-1])
    row = {"response_length": 1, "status": HOSTILE, "metadata": {"leaf": {"path_node_ids": [HOSTILE]}}}
    hostile = folder / "hostile <i>.jsonl"
    lines = [
        {**row, "group_index": HOSTILE, "rollout_id": f"{HOSTILE}{n}", "reward": float(n > 1)} for n in (0, 1, 1, 2)
    ]
    hostile.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    dumps = {"one": [EXAMPLE], "mainstream": [MAINSTREAM], "run": steps, "hostile": [hostile]}
    reports = {}
    for name, paths in dumps.items():
        reports[name] = folder / f"{name}.html"
        assert main(["audit", *map(str, paths), "-o", str(reports[name])]) == 0
    return reports


Open = Callable[..., Any]


def group_ids(page: Any) -> list[str]:
    return [row.get_attribute("data-group") for row in page.locator("tr.group").all()]


def column(page: Any, name: str) -> list[str]:
    return [
        cell.inner_text().strip("▸▾ ").split()[-1] for cell in page.locator(f'tr.group td[data-name="{name}"]').all()
    ]


def unfold(details: Any) -> None:
    """Press the summary; what is inside is made a moment later."""
    details.locator("summary").first.click()
    details.locator(":scope > :nth-child(2)").wait_for()


def test_first_what_is_wrong(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["mainstream"])
    assert page.title() == "Rollout audit of miles_mainstream.pt"
    assert page.locator("main > section").first.get_attribute("id") == "findings"
    assert page.locator("#findings h2").inner_text() == "5 findings"
    first = page.locator(".finding").first.inner_text()
    assert "Siblings of rollouts 1, 4, 12, 15, 20, 23 have different rewards" in first
    assert "What to change: give every row the reward of its rollout" in first


def test_sort(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["mainstream"])
    assert group_ids(page) == ["0", "1", "2", "3", "4", "5"]
    page.get_by_role("button", name="rows", exact=True).click()
    assert column(page, "rows") == ["16", "11", "9", "9", "9", "4"]
    head = page.locator("#groups th", has_text=re.compile("^rows$"))
    assert head.get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="rows", exact=True).click()
    assert column(page, "rows") == ["4", "9", "9", "9", "11", "16"]
    assert head.get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="group", exact=True).click()
    assert group_ids(page) == ["0", "1", "2", "3", "4", "5"]
    assert head.get_attribute("aria-sort") is None
    page.get_by_role("button", name="other sign", exact=True).click()
    assert column(page, "other sign") == ["4", "2", "1", "0", "0", "0"]


def test_search(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["mainstream"])
    search = page.locator("#search")
    search.fill("rollout 23")
    assert group_ids(page) == ["5"]
    assert page.locator("#shown").inner_text() == "1 of 6 groups"
    search.fill("SIBLINGS disagree")
    assert group_ids(page) == ["0", "1", "3", "5"]
    page.get_by_role("button", name="rows", exact=True).click()
    assert group_ids(page) == ["5", "0", "1", "3"]
    search.fill("nothing like this")
    assert group_ids(page) == []
    search.fill("")
    assert len(group_ids(page)) == 6


def test_the_tree_of_a_rollout(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["one"])
    page.get_by_role("button", name="rollouts of group 0").click()
    rollouts = page.locator(".rollout")
    assert [each.get_attribute("data-rollout") for each in rollouts.all()] == ["0", "1", "2", "3"]
    assert page.locator(".card").count() == 0
    rollout = page.locator('.rollout[data-rollout="1"]')
    unfold(rollout)
    assert rollout.locator(".turns").all_inner_texts() == [
        "turns 0 → 2",
        "turns 4 → 6",
        "turns 3 → 5",
        "turns 7 → 8",
        "turn 9",
    ]
    # Rows 2 and 3 are branches of one conversation and hang below its first turns; the others are roots of their own.
    first = rollout.locator(".tree > li").first
    assert [card.get_attribute("data-row") for card in first.locator(".card").all()] == ["2", "3"]
    assert [card.get_attribute("data-row") for card in rollout.locator(".card").all()] == ["2", "3", "4", "5"]
    assert rollout.locator(".badge.speaks").count() == 1
    row = rollout.locator('.card[data-row="3"]')
    text = row.inner_text()
    parts = ["mainstream row", "31 of 116 response tokens trained, 178 in all", "reward 0.2500", "advantage −0.4392"]
    for part in [*parts, "baseline rows −0.5976", "weight of a token 5.95e−4"]:
        assert part in text
    # The mask has one cell per token, in runs: 3 + 15 + 9 + 4 of them are trained.
    runs = [float(each.get_attribute("width")) for each in row.locator(".strip .trained").all()]
    assert sum(runs) == 31
    why = rollout.locator("dl").last.inner_text()
    assert "row 3 speaks, with the most trainable tokens" in why
    assert "grpo: (0.25 - 0.4375) / (0.4269563 + 1e-06) = -0.439154" in why
    page.get_by_role("button", name="rollouts of group 0").click()
    assert page.locator(".rollout").count() == 0


def test_rows_that_turn_are_marked(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["mainstream"])
    page.get_by_role("button", name="rollouts of group 0").click()
    rollout = page.locator('.rollout[data-rollout="1"]')
    assert "other sign" in rollout.locator("summary").inner_text()
    unfold(rollout)
    assert [card.get_attribute("data-row") for card in rollout.locator(".card:has(.badge.bad)").all()] == ["2"]
    page.locator("#advantages .dot").first.wait_for()
    # One rollout speaks through a row that turns.
    assert page.locator("#advantages .dot.flip").count() == 1
    assert page.locator("#advantages .dot").count() == 24


def test_theme(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["one"])
    background = "getComputedStyle(document.body).backgroundColor"
    button = page.locator("#theme")
    assert button.inner_text() == "Theme: auto"
    light = page.evaluate(background)
    button.click()
    assert (button.inner_text(), page.evaluate(background)) == ("Theme: light", light)
    button.click()
    assert button.inner_text() == "Theme: dark"
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert (button.inner_text(), page.evaluate(background)) == ("Theme: dark", dark)
    button.click()
    assert (button.inner_text(), page.evaluate(background)) == ("Theme: auto", light)
    assert open_page(reports["one"], dark=True).evaluate(background) == dark


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(open_page: Open, reports: dict[str, Path], dark: bool) -> None:
    """WCAG's 4.5 for text on each background it stands on, and 3 for marks."""
    page = open_page(reports["one"], dark=dark)
    value = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    for names, least in ((("text", "muted", "warn", "bad", "rollouts"), 4.5), (("rows", "third", "mask"), 3.0)):
        for name in names:
            for ground in ("bg", "panel"):
                one, other = (luminance(page.evaluate(value, f"--{each}")) for each in (name, ground))
                ratio = (max(one, other) + 0.05) / (min(one, other) + 0.05)
                assert ratio >= least, f"{name} on {ground}: {ratio:.2f}"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["mainstream", "run"])
def test_a_phone(open_page: Open, reports: dict[str, Path], name: str, dark: bool) -> None:
    """At 400 pixels nothing is cut off, no text is small, and everything can be reached."""
    page = open_page(reports[name], phone=True, dark=dark)
    page.locator(".open").first.click()
    unfold(page.locator(".rollout").nth(1))
    unfold(page.locator("#figures details"))
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(SMALL) == []
    # A plot keeps its text at its size: it is drawn as wide as its place, not scaled.
    for plot in page.locator(".plot svg").all():
        box, width = plot.bounding_box(), float(plot.get_attribute("width"))
        assert box["width"] == pytest.approx(width, abs=1)
    page.locator("#sort").select_option("fan_out")
    assert [int(text) for text in column(page, "fan-out")] == sorted(
        (int(t) for t in column(page, "fan-out")), reverse=True
    )


def test_a_finding_leads_to_its_group(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["mainstream"])
    page.locator("#search").fill("rollout 23")
    page.locator("#finding-disagreeing_siblings").get_by_role("button", name="group 3").click()
    assert page.locator("#search").input_value() == ""
    assert page.locator(".rollout").count() == 4
    assert page.locator("#group-3").evaluate(
        "each => each.getBoundingClientRect().top >= -1 && each.getBoundingClientRect().top < innerHeight - 50"
    )


def test_a_dot_leads_to_its_group(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["mainstream"])
    dot = page.locator("#advantages .dot.flip")
    assert dot.locator("title").text_content().startswith("rollout 3, group 0: reward ")
    dot.dispatch_event("click")
    assert [each.get_attribute("data-rollout") for each in page.locator(".rollout").all()] == ["0", "1", "2", "3"]


def test_weights_under_each_aggregation(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["one"])

    def heights() -> set[str]:
        page.locator("#weights .dot").first.wait_for()
        return {dot.get_attribute("cy") for dot in page.locator("#weights .dot").all()}

    assert len(heights()) == 5  # fan-outs 1 to 5
    for name in ("rollout_mean", "rollout_row_mean"):
        page.locator("#aggregation").select_option(name)
        assert len(heights()) == 1
    page.locator("#aggregation").select_option("token_mean")
    assert len(heights()) > 5


def test_the_run_over_its_steps(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["run"])
    assert "5 dumps: 290 rows, 120 rollouts, 30 prompt groups" in page.locator("header").inner_text()
    assert page.locator("#run figure").count() == 6
    figure = page.locator("#run figure").first
    assert "last" in figure.locator(".legend").inner_text()
    figure.locator("svg").hover(position={"x": 56, "y": 60})
    text = figure.locator(".legend").inner_text()
    assert "rollout_0.pt" in text
    # Rollout 0 has reward 1 instead of 0 in step 0: (24 * 0.4375 + 1) / 24 and (58 * 0.44396 + 2) / 58.
    assert re.findall(r"0\.\d{4}", text) == ["0.4792", "0.4784"]
    assert "In 5 of 5 dumps; shown for rollout_0.pt." in page.locator(".finding").first.inner_text()
    assert column(page, "step")[:7] == ["rollout_0.pt"] * 6 + ["rollout_1.pt"]
    page.locator("#search").fill("rollout_3.pt rollout 23")
    assert group_ids(page) == ["5"]


def test_hostile_ids_are_shown_as_text(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["hostile"])
    page.locator(".open").first.click()
    for rollout in page.locator(".rollout").all():
        unfold(rollout)
    assert page.locator("main img, main b:not(.cross), main script, main i:not(.key i)").count() == 0
    text = page.locator("main").inner_text()
    assert text.count(HOSTILE) >= 6
    assert HOSTILE.lower() in text  # the status of a row
    assert "hostile <i>.jsonl" in text
    page.locator("#search").fill("<b>bold</b>0")
    assert len(group_ids(page)) == 1


def test_all_figures(open_page: Open, reports: dict[str, Path]) -> None:
    page = open_page(reports["run"])
    unfold(page.locator("#figures details"))
    cells = {
        row.locator("td").first.inner_text(): row.locator("td").all_inner_texts()
        for row in page.locator("#figures tr").all()[1:]
    }
    assert cells["rows"] == ["rows", "58", "58", "58", "58"]
    assert "vs_rows/mean_abs_change" in cells
