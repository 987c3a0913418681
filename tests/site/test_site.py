"""The site shows every page and public name, leads nowhere wrong, asks no network and shows no markup."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
DOCS = [path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").glob("**/*.md")]
ROOMS = {
    "loss": ["miles_norm.loss"],
    "data": ["miles_norm.sharding", "miles_norm.streaming", "miles_norm.storage"],
    "session": [
        "miles_norm.session",
        "miles_norm.session.server",
        "miles_norm.session.rollout",
        "miles_norm.session.engines.protocol",
        "miles_norm.session.wire",
    ],
    "integrations": [
        "miles_norm.integrations.miles",
        "miles_norm.integrations.slime",
        "miles_norm.integrations.agent_lightning",
    ],
    "audit": ["miles_norm.audit", "miles_norm.audit.loggers"],
    "cluster": ["miles_norm.cluster"],
    "errors": ["miles_norm.errors"],
}


def test_every_document_is_a_page_of_the_navigation(pages: Any) -> None:
    assert set(DOCS) | {"404.html"} == set(pages)
    assert {f"./{name}" for name in DOCS} - {"./index.html"} <= set(pages["index.html"].links)


def test_every_public_name_is_in_the_reference(pages: Any) -> None:
    shown = set().union(*(page.ids for name, page in pages.items() if name.startswith("api/")))
    names = {path.rpartition(".")[2] for path in shown if path.startswith("miles_norm.")}
    assert set(import_module("miles_norm").__all__) - names == set()


@pytest.mark.parametrize("name", ROOMS)
def test_every_name_of_a_room_is_on_its_page(pages: Any, name: str) -> None:
    names = {f"{room}.{public}" for room in ROOMS[name] for public in import_module(room).__all__}
    made_by_ray = {"miles_norm.cluster.RolloutNormalizer"}
    assert names - pages[f"api/{name}.html"].ids == names & made_by_ray


def test_links_lead_to_pages_and_headings(pages: Any) -> None:
    broken = []
    for name, page in pages.items():
        for link in page.links:
            address, _, anchor = link.partition("#")
            if name == "404.html" or re.match(r"[a-z]+:", address):
                continue
            target = (page.path.parent / address).resolve() if address else page.path
            found = pages.get(target.relative_to(SITE).as_posix()) if target.is_relative_to(SITE) else None
            if not target.exists() or (anchor and found is not None and anchor not in found.ids):
                broken.append((name, link))
    assert broken == []


def test_nothing_is_loaded_from_a_network(pages: Any) -> None:
    assert {load for page in pages.values() for load in page.loads if re.match(r"([a-z]+:)?//", load)} == set()


def test_no_markup_is_left(pages: Any) -> None:
    for name, page in pages.items():
        left = re.findall(r"\.\. \w+::|:math:|:\w+:`|====|>>>|\$|\*\*|``|\\[a-z]+", page.words)
        assert (name, left) == (name, [])
        assert (name, re.findall(r"\\\w*|\$", page.formulas)) == (name, [])
    assert pages["api/rewards.html"].formulas
