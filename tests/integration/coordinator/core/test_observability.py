"""Metrics, log lines and traces of requests, tasks and workers."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fedssl import tracing
from fedssl_coordinator.core.celery_app import app as celery
from fedssl_coordinator.core.logs import add_subject
from fedssl_worker import metrics as worker_metrics
from support.coordinator import Coordinator
from support.scenario import Scenario
from support.tables import Tables

DASHBOARD = Path(__file__).parents[4] / "deploy" / "grafana" / "fedssl.json"


def numbers(coordinator: Coordinator) -> dict[str, float]:
    with coordinator.http() as http:
        lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def task(run_id: UUID, **headers: str) -> None:
    """Run the task that advances a run, in this process, with Celery's signals."""
    celery.tasks["fedssl.advance_run"].apply(args=[str(run_id)], headers=headers or None, throw=True)


def test_a_round_is_counted_in_the_metrics(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    before = numbers(coordinator)
    scenario = Scenario(coordinator, tables, tmp_path)
    scenario.work("a")
    scenario.claim("b")
    scenario.expire_lease("b")
    task(scenario.id)
    scenario.work("b")
    task(scenario.id)
    after = numbers(coordinator)
    assert after['fedssl_rounds{verdict="aggregated"}'] == 1
    assert after['fedssl_assignments{state="expired"}'] == 1
    assert after['fedssl_clients{state="known"}'] == 2
    update = next(part.update for part in scenario.rounds[0].assignments if part.update)
    size = (coordinator.store / update[:2] / update[2:4] / update).stat().st_size
    assert after["fedssl_upload_bytes_total"] - before["fedssl_upload_bytes_total"] == 2 * size
    name = 'fedssl_task_seconds_count{task="advance_run"}'
    assert after[name] - before.get(name, 0) == 2
    assert not [name for name in after if str(scenario.id) in name]


def test_the_dashboard_shows_every_metric_and_no_unknown_one(coordinator: Coordinator, tables: Tables) -> None:
    from fedssl_coordinator.core.metrics import REGISTRY

    shown = {name.partition("{")[0] for name in numbers(coordinator)}
    for registry in (REGISTRY, worker_metrics.REGISTRY):
        for metric in registry.collect():
            endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
            shown |= {metric.name + ending for ending in endings}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"fedssl_\w+", query)}
    assert asked <= shown, asked - shown
    own = {name for name in shown if name.startswith("fedssl_") and not name.endswith(("_sum", "_count", "_created"))}
    assert own - asked == set(), "nobody looks at these"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Yield the text that collects what the coordinator logs, as JSON lines."""
    before, text = structlog.get_config(), io.StringIO()
    structlog.configure(
        processors=[add_subject, structlog.processors.JSONRenderer(default=repr)],
        logger_factory=structlog.PrintLoggerFactory(text),
        cache_logger_on_first_use=False,
    )
    # The coordinator of an earlier test may have logged in this process: its loggers keep their earlier configuration.
    for module in ("app", "aggregator.tasks"):
        monkeypatch.setattr(f"fedssl_coordinator.{module}.log", structlog.get_logger(module))
    yield text
    structlog.configure(**before)


def test_log_lines_name_their_run_round_and_client(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path)
    item = scenario.claim("a")

    def fail(*_: object) -> None:
        structlog.get_logger("x").warning("inside")
        raise RuntimeError("on purpose")

    monkeypatch.setattr("fedssl_coordinator.federation.work.service.rounds.get_one", fail)
    with pytest.raises(Exception, match="log has the details"):
        scenario.workers["a"].decline(item.assignment_id, "no")
    monkeypatch.setattr("fedssl_coordinator.federation.rounds.service.next_step", fail)
    task(scenario.id)
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    about = [(line["event"], line.get("run"), line.get("round"), line.get("client")) for line in said]
    assert ("inside", str(scenario.id), 1, "a") in about
    assert ("request.crashed", str(scenario.id), 1, "a") in about
    assert ("run.stalled", str(scenario.id), None, None) in about


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """Yield an exporter that keeps the spans of this process in memory."""
    kept = InMemorySpanExporter()
    tracing.configure("test", kept)
    yield kept
    tracing._is_on = False


def test_a_round_is_one_trace(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, names="a")
    scenario.claim("a")
    exporter.clear()
    with tracing.round_span("work", scenario.id, 1, client="a"):
        carried = tracing.carried()
        scenario.upload("a")
    task(scenario.id, **carried)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    expected = trace.format_trace_id(spans["work"].context.trace_id)
    assert expected == tracing.round_trace(scenario.id, 1)["traceparent"].split("-")[1]
    for name in ("PUT /v1/artifacts/{digest}", "POST /v1/work/submit", "fedssl.advance_run"):
        assert parent(spans[name]) == spans["work"].context.span_id, name
    assert trace.format_trace_id(spans["aggregate"].context.trace_id) == expected
    assert spans["aggregate"].attributes == {"fedssl.run": str(scenario.id), "fedssl.round": 1}
    assert (spans["POST /v1/work/submit"].attributes or {})["http.response.status_code"] == 200


def test_messages_carry_the_trace_of_their_sender(
    coordinator: Coordinator, exporter: InMemorySpanExporter, tables: Tables
) -> None:
    from fedssl_coordinator.core import enqueue, queues

    queues.redis_connection().delete("aggregate")
    with tracing.span("asked"):
        carried = tracing.carried()
        enqueue._send_task("advance_run", str(UUID(int=7)))
    (message,) = queues.redis_connection().lrange("aggregate", 0, -1)
    queues.redis_connection().delete("aggregate")
    assert json.loads(message)["headers"]["traceparent"] == carried["traceparent"]


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id
