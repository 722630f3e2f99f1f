"""Grafana's dashboard asks as Prometheus needs it; that its numbers exist is asserted where they are made."""

import json
import re
from pathlib import Path

from support.coordinator import Coordinator

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "fedssl.json"


def test_only_what_never_goes_down_is_asked_for_its_increase(standing: Coordinator) -> None:
    """Deleting a run takes its rounds out of the tables: to `increase` that is a counter that began again."""
    with standing.http() as http:
        shown = http.get("/metrics").text
    gauges = set(re.findall(r"# TYPE (fedssl_\w+) gauge", shown))
    assert {"fedssl_rounds", "fedssl_assignments"} <= gauges
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:increase|rate)\((fedssl_\w+)", query)}
    assert asked
    assert asked & gauges == set()
