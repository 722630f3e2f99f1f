"""The queries of Grafana's dashboard suit the kinds of Prometheus metrics. Other tests check that the metrics exist."""

import json
import re
from pathlib import Path

from support.coordinator import Coordinator

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "fedssl.json"


def test_the_dashboard_uses_increase_and_rate_only_with_counters(shared_coordinator: Coordinator) -> None:
    """Deleting a run removes its rounds from the tables, which `increase` would take for a counter that was reset."""
    with shared_coordinator.http() as http:
        shown = http.get("/metrics").text
    gauges = set(re.findall(r"# TYPE (fedssl_\w+) gauge", shown))
    assert {"fedssl_rounds", "fedssl_assignments"} <= gauges
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:increase|rate)\((fedssl_\w+)", query)}
    assert asked
    assert asked & gauges == set()
