"""A small update is sent with its submission in one request if the coordinator supports that."""

import pytest
from structlog.testing import capture_logs

from fedssl.protocol.work import DELIVERY_BYTES
from fedssl_worker import lease
from fedssl_worker.disclosure.ledger import Ledger, LedgerError

from .conftest import WorkerHarness, make_spec
from .coordinator import Refusal


@pytest.fixture(autouse=True)
def _taken(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_PROGRESS_SECONDS", 60.0)  # no heartbeat, however slow the machine is
    harness.coordinator.delivery_bytes = DELIVERY_BYTES


def test_one_request_contains_the_update_its_numbers_and_the_anchor(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    agent, reregister = harness.reregistering()
    reregister()
    agent.step()
    coordinator = harness.coordinator
    assert coordinator.calls == ["register", "claim", "GET artifact", "deliver"]
    [submission] = coordinator.submissions
    assert submission.num_examples == 32
    assert harness.kinds() == ["opened", "receipt", "intent", "sent", "receipt"]
    assert [anchor.seq for anchor in coordinator.anchors] == [1, 3]
    *_, sent, _ = harness.ledger()
    assert (sent["digest"], sent["sent_bytes"], sent["bytes"]) == (
        submission.update, len(coordinator.artifacts[submission.update]), len(coordinator.artifacts[submission.update])
    )  # fmt: skip
    agent.step()  # what is not anchored yet is sent with the next update
    assert coordinator.calls[4:] == ["claim"]


def test_a_delivery_is_repeated_if_its_answer_is_lost(harness: WorkerHarness) -> None:
    harness.coordinator.drop_answer_of = "deliver"
    harness.offer(make_spec(), 1)
    harness.restart().step()
    assert harness.coordinator.calls.count("deliver") == 2
    assert len(harness.coordinator.submissions) == 1
    sent = next(entry for entry in harness.ledger() if entry["kind"] == "sent")
    assert sent["sent_bytes"] == 2 * sent["bytes"]


@pytest.mark.full(but=2)
@pytest.mark.parametrize("status", [404, 413, 400, 405, 411, 414, 431])
def test_an_update_is_uploaded_and_submitted_if_a_proxy_or_older_coordinator_refuses_it(
    harness: WorkerHarness, status: int
) -> None:
    def refuse(call: str) -> None:
        if call == "deliver":
            raise Refusal("", status)

    harness.coordinator.before = refuse
    agent = harness.restart()
    with capture_logs() as logs:
        for number in (1, 2):
            harness.offer(make_spec(), number)
            agent.step()
    assert [log["event"] for log in logs if log["event"] == "delivery.refused"] == ["delivery.refused"]
    assert "ledger.receipt_missing" not in {log["event"] for log in logs}  # the anchor is sent again
    calls = [call for call in harness.coordinator.calls if call in ("deliver", "PUT artifact", "submit")]
    assert calls == ["deliver", "PUT artifact", "submit", "PUT artifact", "submit"]
    first, second = [entry for entry in harness.ledger() if entry["kind"] == "sent"]
    assert (first["sent_bytes"], second["sent_bytes"]) == (first["bytes"], second["bytes"])
    assert harness.kinds().count("intent") == 3  # a refused delivery may still have left


def test_a_larger_update_is_uploaded(harness: WorkerHarness) -> None:
    harness.coordinator.delivery_bytes = 100
    harness.offer(make_spec(), 1)
    harness.restart().step()
    assert harness.coordinator.calls[-2:] == ["PUT artifact", "submit"]


@pytest.mark.parametrize("slug", ["lease-lost", "round-closed"])
def test_work_ends_if_the_coordinator_itself_refuses_the_delivery(harness: WorkerHarness, slug: str) -> None:
    def refuse(call: str) -> None:
        if call == "deliver":
            raise Refusal(slug, 410 if slug == "round-closed" else 409)

    harness.coordinator.before = refuse
    harness.offer(make_spec(), 1)
    harness.restart().step()
    assert harness.coordinator.calls[-1] == "deliver"
    assert harness.kinds()[-1] != "sent"


def test_the_state_is_kept_if_the_ledger_fails_after_the_acceptance(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update counts, so declining the work now would discard the state that belongs to it."""
    append = Ledger.append

    def fail(ledger: Ledger, kind: str, **fields: object) -> object:
        if kind == "sent":
            raise LedgerError("no space")
        return append(ledger, kind, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "append", fail)
    agent = harness.restart()
    harness.offer(make_spec(), 1)
    agent.step()
    assert harness.coordinator.declined == []
    assert harness.coordinator.last_accepted is not None
    monkeypatch.undo()
    harness.offer(make_spec(), 2)
    agent.step()
    assert harness.coordinator.submissions[-1].assignment_id != harness.coordinator.submissions[0].assignment_id
    assert not any(beat.state_lost for beat in harness.coordinator.heartbeats)
