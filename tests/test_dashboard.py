"""The Grafana dashboard shows every metric of ours, and none that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sglang_neo import metrics
from tests.harness.models import REPO_ROOT

DASHBOARD = REPO_ROOT / "docs" / "grafana" / "sglang-neo-dashboard.json"


def test_the_dashboard_and_the_metrics_agree() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = set(re.findall(r"sglang:(neo_\w+)", " ".join(expressions)))
    shown = {re.sub("_bucket$", "", name) for name in shown}
    source = (REPO_ROOT / "sglang_neo" / "metrics.py").read_text()
    assert metrics.__file__ is not None and shown == set(
        re.findall(r'(?i:counter|gauge|histogram)\(\s*"(?:sglang:)?(neo_\w+)"', source)
    )


def test_sglangs_own_metrics_in_it_exist() -> None:
    from sglang.srt.observability import metrics_collector

    text = DASHBOARD.read_text()
    own = set(re.findall(r"sglang:(?!neo_)(\w+)", text))
    source = Path(metrics_collector.__file__).read_text()
    assert own and all(f"sglang:{name}" in source for name in own), own


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
