"""Anchors of the ledger are sent with other requests, one at a time, and stored with their receipts."""

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.client import Unreachable
from fedssl.protocol.ledger import SentBroadcast
from fedssl.protocol.work import WorkItem
from fedssl_worker import lease
from fedssl_worker.disclosure.ledger.verification import broadcast_differences, signed_broadcasts, verify
from fedssl_worker.main import app

from .conftest import CLIENT, RUN, WorkerHarness, good_update, make_spec

WEIGHTS = ("[[allow]]", 'artifact = "weights"', 'methods = ["fedbyol"]')


def test_what_was_sent_is_anchored_by_requests_that_are_made_anyway(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_PROGRESS_SECONDS", 60.0)  # no heartbeat, however slow the machine is
    harness.offer(make_spec(), 1)
    agent, reregister = harness.reregistering(harness.write_policy(*WEIGHTS))
    reregister()
    agent.step()
    assert harness.kinds() == ["opened", "receipt", "intent", "sent", "receipt"]
    assert [anchor.seq for anchor in harness.coordinator.anchors] == [1, 4]
    receipt = harness.ledger()[-1]
    assert receipt["anchored_seq"] == 4
    assert receipt["head"] == harness.coordinator.anchors[-1].head
    agent.step()  # nothing is new, so nothing is anchored, and a receipt by itself does not cause another anchor
    assert len(harness.coordinator.anchors) == 2
    assert "heartbeat" not in harness.coordinator.calls


def test_an_idle_worker_anchors_a_refusal(harness: WorkerHarness) -> None:
    agent = harness.restart(harness.write_policy())
    harness.offer(make_spec(), 1)
    agent.step()
    assert harness.coordinator.anchors == []
    agent.step()
    assert [anchor.seq for anchor in harness.coordinator.anchors] == [2]
    assert harness.kinds() == ["opened", "refused", "receipt"]


def test_an_unanswered_anchor_is_sent_again_before_a_newer_one(harness: WorkerHarness, item: WorkItem) -> None:
    egress = harness.egress()
    path = harness.folder / "update"
    save_tensors(good_update(), path)
    with pytest.raises(Unreachable), egress.anchoring.exchange():
        raise Unreachable("no answer")
    egress.send(item, path, digest_of(path))
    with egress.anchoring.exchange() as exchange, egress.anchoring.exchange() as other:
        assert exchange.anchor is not None
        assert exchange.anchor.seq == 1
        assert other.anchor is None  # one at a time
        exchange.receipt = harness.coordinator.anchor(exchange.anchor)
    with egress.anchoring.exchange() as exchange:
        assert exchange.anchor is not None
        assert exchange.anchor.seq == 4
    assert harness.kinds() == ["opened", "intent", "sent", "receipt"]


def test_a_missing_receipt_is_logged_once(harness: WorkerHarness) -> None:
    harness.coordinator.gives_receipts = False
    agent, reregister = harness.reregistering(harness.write_policy())
    with capture_logs() as logs:
        reregister()
        agent.step()
    assert [line["entry"] for line in logs if line["event"] == "ledger.receipt_missing"] == [1]
    assert harness.kinds() == ["opened"]


@pytest.mark.parametrize("changes", [{"at": "2020-01-01T00:00:00.000000+00:00"}, {"seq": 2}, {"head": "f" * 64}])
def test_a_forged_receipt_is_not_kept(harness: WorkerHarness, changes: dict[str, Any]) -> None:
    egress = harness.egress()
    with capture_logs() as logs, egress.anchoring.exchange() as exchange:
        receipt = harness.coordinator.anchor(exchange.anchor)
        assert receipt is not None
        exchange.receipt = receipt.model_copy(update=changes)
    assert logs[-1]["event"] == "ledger.receipt_invalid"
    assert harness.kinds() == ["opened"]


def test_differences_between_signed_broadcasts_of_two_owners_are_found(harness: WorkerHarness, tmp_path: Path) -> None:
    harness.offer(make_spec(), 1)
    harness.restart(harness.write_policy(*WEIGHTS)).step()
    verify(harness.folder / "ledger")
    [own] = signed_broadcasts(harness.folder / "ledger")
    assert own["run"] == harness.ledger()[-1]["run"]
    assert own["round"] == 1
    assert broadcast_differences([own], [own]) == (1, [])
    sent = SentBroadcast(run=own["run"], round=1, broadcast="f" * 64)
    receipt = harness.coordinator.anchor(harness.coordinator.anchors[-1], sent)
    assert receipt is not None
    other = {**own, "broadcast": "f" * 64, "signature": receipt.signature, "client": receipt.client_id}
    num_shared, [difference] = broadcast_differences([own], [other])
    assert num_shared == 1
    assert f"broadcast {own['broadcast']} for" in difference
    for rows in ([other, own], [own, other, other]):  # the round was trained twice, from different weights
        assert broadcast_differences(rows, [own]) == (
            1,
            [f"run {own['run']}, round 1: broadcast {'f' * 64} for {CLIENT}, {own['broadcast']} for {CLIENT}"],
        )
        assert broadcast_differences([own], rows) == (1, [difference])
    path = tmp_path / "other.json"
    state = tmp_path / "state"
    state.mkdir()
    (state / "ledger").symlink_to(harness.folder / "ledger")
    command = ["ledger", "broadcasts", "--state", str(state)]
    assert json.loads(CliRunner().invoke(app, [*command, "--format", "json"]).stdout) == [own]
    assert own["broadcast"][:20] in CliRunner().invoke(app, command).stdout
    for rows, code, text in (
        ([own], 0, "the same broadcast for both clients in the only round that both have"),
        ([other], 4, "DIFFERENT: run "),
        ([{**own, "broadcast": "f" * 64}], 4, "does not match"),
        ([{}], 4, "take the output of `fedssl-worker ledger broadcasts --format json`"),
    ):
        path.write_text(json.dumps(rows))
        result = CliRunner().invoke(app, [*command, "--compare", str(path)])
        assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


def test_a_receipt_for_another_broadcast_is_kept_as_evidence(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = SentBroadcast(run=RUN, round=1, broadcast="f" * 64)
    monkeypatch.setattr(harness.coordinator, "sent", lambda submit: lie)
    harness.offer(make_spec(), 1)
    with capture_logs() as logs:
        harness.restart(harness.write_policy(*WEIGHTS)).step()
    assert [line["signed"] for line in logs if line["event"] == "ledger.broadcast_differs"] == ["f" * 64]
    assert harness.ledger()[-1]["broadcast"] == "f" * 64


def test_a_receipt_without_the_broadcast_is_logged(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.coordinator, "sent", lambda submit: None)
    item = harness.item(make_spec(), 1)
    harness.coordinator.offer(item)
    with capture_logs() as logs:
        harness.restart(harness.write_policy(*WEIGHTS)).step()
    assert len(harness.coordinator.submissions) == 1
    assert [line["trained"] for line in logs if line["event"] == "ledger.broadcast_unsigned"] == [item.broadcast]
