"""Every operation of the REST API has a command that requests it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from fedssl.data import ImageData, save_npz
from support.answers import Answers, answering
from support.federation import tiny_spec
from support.openapi import api_document, operations
from support.weights import encoder_file

RUN, JOB, EVALUATION, TOKEN = (str(UUID(int=number)) for number in (1, 2, 3, 4))
DIGEST = "0" * 64
NOW = "2026-11-20T12:00:00Z"

FOR_PROGRAMS = {
    "POST /v1/work/register",
    "POST /v1/work/claim",
    "POST /v1/work/heartbeat",
    "POST /v1/work/site-evaluations/claim",
    "POST /v1/work/site-evaluations/submit",
    "POST /v1/work/secure/send",
    "POST /v1/work/secure/status",
    "POST /v1/work/submit",
    "POST /v1/work/deliver",
    "POST /v1/work/decline",
    "POST /v1/work/ended-runs",
    "POST /v1/work/data-report",
    "POST /v1/uploads",
    "HEAD /v1/uploads/{upload_id}",
    "PATCH /v1/uploads/{upload_id}",
    "DELETE /v1/uploads/{upload_id}",
    "POST /v1/uploads/{upload_id}/parts",
    "POST /v1/enrolments",
    "GET /metrics",
    "HEAD /v1/artifacts/{digest}",
    "HEAD /v1/runs/{run_id}/model",
}
"""The operations that only a worker, a file transfer or Prometheus requests."""

COMMANDS = {
    "GET /healthz": "doctor",
    "GET /readyz": "doctor",
    "GET /v1/methods": "method ls --remote",
    "GET /v1/methods/{name}": "method show fedbyol --remote",
    "GET /v1/runs": "run ls --state running",
    "POST /v1/runs": "run submit spec.json",
    "POST /v1/estimates": "run submit spec.json --dry-run",
    "GET /v1/runs/{run_id}": f"run show {RUN}",
    "PATCH /v1/runs/{run_id}": f"run edit {RUN} --notes later",
    "DELETE /v1/runs/{run_id}": f"run delete {RUN} --yes",
    "POST /v1/runs/{run_id}/start": f"run start {RUN}",
    "POST /v1/runs/{run_id}/pause": f"run pause {RUN}",
    "POST /v1/runs/{run_id}/resume": f"run resume {RUN}",
    "POST /v1/runs/{run_id}/stop": f"run stop {RUN}",
    "POST /v1/runs/{run_id}/continue": f"run continue {RUN} --rounds 20",
    "GET /v1/runs/{run_id}/rounds": f"run rounds {RUN}",
    "GET /v1/runs/{run_id}/rounds/{number}/assignments": f"run rounds {RUN} --round 1",
    "GET /v1/runs/{run_id}/metrics": f"run metrics {RUN} --name loss",
    "GET /v1/runs/{run_id}/events": f"run logs {RUN} --kind round.closed",
    "GET /v1/runs/{run_id}/events/stream": f"run logs {RUN} --follow",
    "GET /v1/runs/{run_id}/model": f"run pull {RUN}",
    "GET /v1/runs/{run_id}/dimension-assignments": f"run dimensions {RUN}",
    "GET /v1/runs/{run_id}/distillation-jobs": f"run distillations {RUN}",
    "GET /v1/distillation-jobs/{job_id}": f"run distillations {RUN} --job {JOB}",
    "POST /v1/distillation-jobs/{job_id}/cancel": f"run cancel-distillation {RUN}",
    "GET /v1/runs/{run_id}/evaluations": f"run evaluations {RUN}",
    "GET /v1/runs/{run_id}/cross-site": f"run cross-site {RUN}",
    "GET /v1/runs/{run_id}/site-evaluations": f"run site-evaluations {RUN}",
    "POST /v1/runs/{run_id}/site-evaluations": f"run evaluate {RUN} --at sites",
    "POST /v1/runs/{run_id}/evaluations": f"run evaluate {RUN} --data held-out",
    "GET /v1/evaluations/{evaluation_id}": f"run evaluate {RUN} --data held-out --wait",
    "GET /v1/evaluations/{evaluation_id}/map": f"run embedding {RUN}",
    "POST /v1/evaluations/{evaluation_id}/cancel": f"run cancel-evaluation {RUN} {EVALUATION}",
    "GET /v1/artifacts/{digest}": f"artifact get {DIGEST}",
    "PUT /v1/artifacts/{digest}": "public-dataset add scans images.npz",
    "GET /v1/public-datasets": "public-dataset ls",
    "POST /v1/public-datasets": "public-dataset add scans images.npz",
    "GET /v1/public-datasets/{name}": "public-dataset show scans",
    "GET /v1/evaluation-datasets": "evaluation-dataset ls",
    "POST /v1/evaluation-datasets": "evaluation-dataset add held-out images.npz",
    "GET /v1/evaluation-datasets/{name}": "evaluation-dataset show held-out",
    "GET /v1/weights": "weights ls",
    "POST /v1/weights": "weights add weights.safetensors --as start",
    "GET /v1/weights/{name}": "weights show start",
    "DELETE /v1/weights/{name}": "weights remove start",
    "GET /v1/clients": "client ls",
    "GET /v1/clients/{client_id}": "client show hospital-a",
    "PATCH /v1/clients/{client_id}": "client rename hospital-a Mary",
    "POST /v1/clients/{client_id}/identity": f"client confirm-identity hospital-a {DIGEST}",
    "POST /v1/clients/{client_id}/revoke": "client revoke hospital-a",
    "GET /v1/clients/{client_id}/ledger-anchors": "client anchors hospital-a",
    "GET /v1/data-card": "client card",
    "GET /v1/projects": "project ls",
    "POST /v1/projects": "project create cardiology",
    "GET /v1/tokens": "token ls",
    "POST /v1/tokens": "token create --role viewer",
    "POST /v1/enrolment-tokens": "token enrol hospital-a",
    "GET /v1/notification-destinations": "notify ls",
    "POST /v1/notification-destinations": "notify add https://hooks.example.org/fedssl",
    "POST /v1/notification-destinations/{destination_id}/test": f"notify test {TOKEN}",
    "GET /v1/notification-destinations/{destination_id}/deliveries": f"notify log {TOKEN}",
    "DELETE /v1/notification-destinations/{destination_id}": f"notify rm {TOKEN}",
    "DELETE /v1/tokens/{token_id}": f"token revoke {TOKEN}",
}
OPERATIONS = sorted(str(operation) for operation in operations(api_document()))

_JOB = {
    "id": JOB, "run_id": RUN, "round_number": 1, "state": "running", "reason": None, "epoch": 1, "num_epochs": 2,
    "loss": None, "seconds_per_epoch": None, "eta_seconds": None, "checkpoint": None, "num_tries": 1,
    "created_at": NOW, "started_at": None, "updated_at": None, "finished_at": None,
}  # fmt: skip
_RUN = {
    "id": RUN, "name": "x", "method": "fedalignuniform", "state": "running", "outcome": None, "reason": None,
    "rounds_closed": 0, "num_rounds": 2, "created_at": NOW, "started_at": NOW, "finished_at": None,
    "spec": tiny_spec().model_dump(mode="json"), "initial_model": None, "model": None, "current_round": None,
    "distillation": _JOB, "clients": [],
}  # fmt: skip
_EVALUATION = {
    "id": EVALUATION, "run_id": RUN, "round_number": 1, "model": DIGEST, "dataset": "held-out",
    "dataset_digest": DIGEST, "config": {"dataset": "held-out"}, "state": "queued", "reason": None, "progress": None,
    "results": None, "num_tries": 0, "created_at": NOW, "started_at": None, "finished_at": None,
}  # fmt: skip
_MAPPED = _EVALUATION | {
    "config": {"dataset": "held-out", "embedding_map": "pca"}, "state": "completed", "results": {}, "finished_at": NOW,
}  # fmt: skip
_ON_THE_WAY: dict[tuple[str, str], Any] = {
    ("GET", "/healthz"): {"status": "ok"},
    ("GET", f"/v1/runs/{RUN}"): _RUN,
    ("GET", f"/v1/runs/{RUN}/evaluations"): {"items": [_MAPPED]},
    ("POST", f"/v1/runs/{RUN}/evaluations"): _EVALUATION,
    ("GET", "/v1/clients"): {"items": []},
    ("GET", "/v1/public-datasets"): {"items": []},
    ("GET", "/v1/evaluation-datasets"): {"items": []},
}
"""The answers to a command's first requests; any other request gets a 404, which ends the command."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_TOKEN", "secret")
    Path("spec.json").write_text(tiny_spec().model_dump_json())
    images = ImageData(np.zeros((4, 1, 8, 8), dtype=np.uint8), np.array([0, 1, 0, 1]))
    save_npz(Path("images.npz"), images, images)
    encoder_file(tmp_path).rename("weights.safetensors")
    with answering(dict(_ON_THE_WAY)) as running:
        monkeypatch.setenv("FEDSSL_URL", running.url)
        yield running


def test_every_operation_of_the_api_has_a_command() -> None:
    assert sorted(COMMANDS.keys() | FOR_PROGRAMS) == OPERATIONS
    assert not COMMANDS.keys() & FOR_PROGRAMS


@pytest.mark.parametrize("operation", COMMANDS)
def test_each_command_requests_its_operation(server: Answers, operation: str) -> None:
    result = CliRunner().invoke(app, COMMANDS[operation].split())

    method, _, template = operation.partition(" ")
    path = re.compile(re.sub(r"\{\w+\}", "[^/]+", template))
    assert any(verb == method and path.fullmatch(asked) for verb, asked in server.asked), result.output + str(
        server.asked
    )
