"""A proxy between a real worker and a real coordinator: every byte that left is in the ledger, or is small JSON."""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from fedssl.data import ImageData, save_npz
from fedssl.protocol.data_card import DataReport
from fedssl.protocol.secure_work import SecureQuery, SecureSubmission
from fedssl.protocol.site_work import SiteAnswer
from fedssl.protocol.states import RunState
from fedssl.protocol.work import DELIVERY_HEADER, Claim, Decline, EndedQuery, Heartbeat, Register, Submit
from fedssl_worker.main import app
from support.commands import json_of
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.listening import LoopbackServer, QuietHandler
from support.openapi import api_document
from support.preloaded import Forked, preloaded
from support.recording import RecordingProxy, Request

JSON: dict[str, type[BaseModel]] = {
    "/v1/work/register": Register,
    "/v1/work/data-report": DataReport,
    "/v1/work/claim": Claim,
    "/v1/work/heartbeat": Heartbeat,
    "/v1/work/submit": Submit,
    "/v1/work/decline": Decline,
    "/v1/work/ended-runs": EndedQuery,  # requested by an idle worker
    "/v1/work/secure/send": SecureSubmission,  # test_secure_rounds.py searches all bytes of a secure round
    "/v1/work/secure/status": SecureQuery,
    "/v1/work/site-evaluations/submit": SiteAnswer,  # compared with the ledger by the worker's unit tests
}
EVALUATION_CLAIM = "/v1/work/site-evaluations/claim"  # has no body
DELIVERY = "/v1/work/deliver"
LONGEST_JSON = 8192
LONGEST_HEAD = 1024  # without the submission in a delivery's head
ROUNDS = 2

POLICY = """
schema = 1
client = "a"
coordinator = "{url}"
[[allow]]
artifact = "weights"
methods = ["fedalignuniform"]
[metrics]
allow = []
[ledger]
segment_entries = 4
"""


@contextmanager
def working(url: str, token: str, folder: Path, *arguments: str) -> Iterator[Forked]:
    """Yield a worker that runs in its own process with 32 images of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 1, 8, 8), dtype=np.uint8)
    save_npz(folder / "own.npz", ImageData(pixels, np.arange(32, dtype=np.int64) % 4))
    command = ["run", "--coordinator", url, "--data", str(folder / "own.npz")]
    command += ["--state", str(folder / "state"), "--device", "cpu", "--claim-seconds", "0.2", *arguments]
    with (folder / "worker.log").open("ab") as log:
        environment = {**os.environ, "FEDSSL_WORKER_TOKEN": token, "OMP_NUM_THREADS": "1"}
        process = preloaded().start("fedssl_worker", command, environment, log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)  # has no effect on an ended process
        process.wait(10)


def wait_for(look: Callable[[], object], folder: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, (folder / "worker.log").read_text()
        time.sleep(0.05)


def finish(coordinator: Coordinator, run_id: UUID, folder: Path) -> None:
    """Bring the run to its end, and let the worker record the answer to its last update before it is stopped."""

    def advanced() -> bool:
        coordinator.advance(run_id)
        return coordinator.client.run(run_id).state is RunState.FINISHED

    wait_for(advanced, folder)
    wait_for(lambda: (folder / "worker.log").read_text().count("update.submitted") == ROUNDS, folder)


def ledger(folder: Path, *arguments: str) -> Any:
    """Return the JSON output of the data owner's command `ledger`."""
    command = ["ledger", *arguments, "--state", str(folder / "state"), "--format", "json"]
    return json_of(CliRunner().invoke(app, command))


def check_json(request: Request) -> BaseModel:
    """Check that a request without an artifact is small and matches the protocol. Return its parsed body."""
    assert len(request.body) <= LONGEST_JSON
    assert request.method == "POST"
    return JSON[request.path].model_validate_json(request.body)  # an unknown key is an error


def test_these_tests_know_every_message_of_the_protocol() -> None:
    paths = api_document()["paths"]
    assert {path for path in paths if path.startswith("/v1/work/")} == {*JSON, DELIVERY, EVALUATION_CLAIM}


@pytest.mark.parametrize(
    "with_policy",
    [pytest.param(False, id="without a policy", marks=pytest.mark.full), pytest.param(True, id="with a policy")],
)
def test_every_byte_that_left_is_in_the_ledger_or_small_json(
    coordinator: Coordinator,
    tmp_path: Path,
    with_policy: bool,  # noqa: FBT001
) -> None:
    run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}, num_rounds=ROUNDS))
    with RecordingProxy(coordinator.url) as proxy:
        arguments: list[str] = []
        if with_policy:
            (tmp_path / "policy.toml").write_text(POLICY.format(url=proxy.url))
            arguments = ["--policy", str(tmp_path / "policy.toml")]
        with working(proxy.url, coordinator.worker_token("a"), tmp_path, *arguments):
            finish(coordinator, run.id, tmp_path)
        requests = proxy.requests()
        assert sum(request.num_bytes for request in requests) == proxy.num_bytes  # no other bytes

    uploads = [request for request in requests if request.path == DELIVERY]
    others = [request for request in requests if request.method == "POST" and request.path != DELIVERY]
    assert {request.method for request in requests} == {"GET", "POST"}
    assert all(not request.body for request in requests if request.method == "GET")
    heads = [request.num_bytes - len(request.body) - len(_submission(request)) for request in requests]
    assert max(heads) <= LONGEST_HEAD
    whole = ledger(tmp_path, "show")
    assert [entry["outcome"] for entry in whole] == ["sent"] * len(whole)
    reports = [request.body for request in others if request.path == "/v1/work/data-report"]
    about_images, written = whole[: len(whole) - ROUNDS], whole[len(whole) - ROUNDS :]
    # With the policy's metrics, the report is empty, and no entry is written for it.
    assert len(reports) == 1
    assert [entry["digest"] for entry in about_images] == [
        hashlib.sha256(body).hexdigest() for body in reports if not with_policy
    ]
    assert [entry["numbers"] for entry in about_images] == ([] if with_policy else [["num_unreadable=0"]])
    assert [hashlib.sha256(request.body).hexdigest() for request in uploads] == [entry["digest"] for entry in written]
    assert [len(request.body) for request in uploads] == [entry["bytes"] for entry in written]
    said = [check_json(request) for request in others]
    submitted = [Submit.model_validate_json(_submission(request)) for request in uploads]
    for message, entry in zip(submitted, written, strict=True):
        assert message.update == entry["digest"]
        numbers = {**message.metrics, "num_examples": message.num_examples}
        assert entry["numbers"] == [f"{name}={numbers[name]!r}" for name in sorted(numbers)]
        assert bool(message.metrics) is not with_policy
    if with_policy:
        beats = [message.progress for message in said if isinstance(message, Heartbeat) and message.progress]
        assert [beat.loss for beat in beats] == [None] * len(beats)
    check_anchored(coordinator, tmp_path)


def _submission(request: Request) -> str:
    return request.headers.get(DELIVERY_HEADER.lower(), "")


def check_anchored(coordinator: Coordinator, folder: Path) -> None:
    """Check that the ledger's chain is intact, and that the anchors agree with it up to its last entries."""
    anchors = [view.model_dump(mode="json") for view in coordinator.client.ledger_anchors("a")]
    (folder / "anchors.json").write_text(json.dumps(anchors))
    report = ledger(folder, "verify", "--anchors", str(folder / "anchors.json"))
    assert report["anchors_compared"] == len(anchors) >= 2
    assert len(report["coordinators"]) == 1
    assert report["unconfirmed"] == []
    # Up to three entries follow the last anchor: its delivery's `sent`, the receipt, and a new segment's first entry.
    assert anchors[-1]["seq"] >= report["last"] - 3
    assert all(anchor["is_consistent"] for anchor in anchors)


def test_no_artifact_is_sent_if_the_policy_refuses_it(coordinator: Coordinator, tmp_path: Path) -> None:
    """The worker registers while the policy allows the run. The policy forbids it before any work arrives."""
    policy = tmp_path / "policy.toml"
    with RecordingProxy(coordinator.url) as proxy:
        policy.write_text(POLICY.format(url=proxy.url))
        token = coordinator.worker_token("a")
        with working(proxy.url, token, tmp_path, "--policy", str(policy)):
            wait_for(lambda: _policy_of(coordinator) is not None, tmp_path)
            policy.write_text(POLICY.format(url=proxy.url).replace("fedalignuniform", "fedbyol"))
            wait_for(lambda: _policy_of(coordinator) == ("fedbyol",), tmp_path)
            run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}))
            coordinator.advance(run.id)
            reason = coordinator.client.run(run.id).reason
            assert reason is not None
            assert "no rule allows weights of fedalignuniform" in reason
        requests = proxy.requests()
    assert {request.method for request in requests} == {"POST"}
    assert [check_json(request).model_fields_set for request in requests]
    assert ledger(tmp_path, "show") == []


def _policy_of(coordinator: Coordinator) -> tuple[str, ...] | None:
    known = coordinator.client.client("a").policy
    return None if known is None else known.allow[0].methods


def test_a_worker_sends_nothing_if_its_policy_has_an_unknown_key(coordinator: Coordinator, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    with RecordingProxy(coordinator.url) as proxy:
        policy.write_text(POLICY.format(url=proxy.url) + "sing = true\n")
        with working(proxy.url, coordinator.worker_token("a"), tmp_path, "--policy", str(policy)) as process:
            assert process.wait(60) == 2
        assert proxy.num_bytes == 0
    assert "ledger.sing: there is no such key" in (tmp_path / "worker.log").read_text()


class _Redirecting(QuietHandler):
    def _answer(self) -> None:
        self.send_response(307)
        self.send_header("Location", f"{self.server.elsewhere}{self.path}")  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = _answer  # noqa: N815 - http.server requires this name


def test_a_worker_does_not_follow_a_redirect_to_another_server(coordinator: Coordinator, tmp_path: Path) -> None:
    with RecordingProxy(coordinator.url) as elsewhere, LoopbackServer(_Redirecting) as front:
        front.elsewhere = elsewhere.url  # type: ignore[attr-defined]
        threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        with working(front.url, coordinator.worker_token("a"), tmp_path) as process:
            log = tmp_path / "worker.log"
            wait_for(lambda: log.read_text().count("redirects to another address") >= 2, tmp_path)
            assert process.poll() is None  # the redirect may be temporary: the worker retries
        front.shutdown()
        assert elsewhere.num_bytes == 0
