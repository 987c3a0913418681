"""The tables of ``docs/audit.md`` name what there is."""

import re
from pathlib import Path

from miles_norm.audit import BASELINES, audit_metrics
from miles_norm.audit.findings import CHECKS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/audit.md").read_text(encoding="utf-8")


def table(head: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", PAGE.split(f"## {head}")[1].split("##")[0], flags=re.MULTILINE)


def test_every_finding_and_baseline_is_documented() -> None:
    assert table("Findings") == list(CHECKS)
    assert sorted(table("Baselines")) == sorted(BASELINES)


def test_every_metric_is_documented() -> None:
    from miles_norm import normalize_rewards

    rows = [{"group_index": 0, "index": n, "reward": float(n), "response_length": 1} for n in range(2)]
    names = [name.removeprefix("miles_norm/") for name in audit_metrics(normalize_rewards(rows))]
    text = PAGE.split("## Metrics")[1]
    generic = r"weight/\w+_(min|max|gini)|vs_rows/|excluded_\w+|group_source_\w+|fan_out_\d+\w*|warnings"
    missing = [name for name in names if not re.match(generic, name) and f"`{name}`" not in text]
    assert missing == []
