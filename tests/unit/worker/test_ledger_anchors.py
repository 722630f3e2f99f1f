"""Anchors of the ledger: carried by requests that are made anyway, one at a time, and kept with their receipts."""

import pytest
from structlog.testing import capture_logs

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.client import Unreachable
from fedssl.protocol.work import WorkItem
from fedssl_worker import lease

from .conftest import Setting, good_update, make_spec

WEIGHTS = ("[[allow]]", 'artifact = "weights"', 'methods = ["fedbyol"]')


def test_requests_that_are_made_anyway_anchor_what_left(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_PROGRESS_SECONDS", 60.0)  # no heartbeat, however slow the machine is
    setting.offer(make_spec(), 1)
    agent, reregister = setting.reregistering(setting.write_policy(*WEIGHTS))
    reregister()
    agent.step()
    assert setting.kinds() == ["opened", "receipt", "intent", "sent", "receipt"]
    assert [anchor.seq for anchor in setting.coordinator.anchors] == [1, 4]
    receipt = setting.ledger()[-1]
    assert receipt["anchored_seq"] == 4
    assert receipt["head"] == setting.coordinator.anchors[-1].head
    agent.step()  # nothing is new: nothing is anchored, and no receipt is a reason for the next
    assert len(setting.coordinator.anchors) == 2
    assert "heartbeat" not in setting.coordinator.calls


def test_an_idle_worker_anchors_a_refusal(setting: Setting) -> None:
    agent = setting.restart(setting.write_policy())
    setting.offer(make_spec(), 1)
    agent.step()
    assert setting.coordinator.anchors == []
    agent.step()
    assert [anchor.seq for anchor in setting.coordinator.anchors] == [2]
    assert setting.kinds() == ["opened", "refused", "receipt"]


def test_an_unanswered_anchor_is_sent_again_before_a_newer_one(setting: Setting, item: WorkItem) -> None:
    egress = setting.egress()
    path = setting.folder / "update"
    save_tensors(good_update(), path)
    with pytest.raises(Unreachable), egress.anchoring.exchange():
        raise Unreachable("no answer")
    egress.send(item, path, digest_of(path))
    with egress.anchoring.exchange() as exchange, egress.anchoring.exchange() as other:
        assert exchange.anchor is not None
        assert exchange.anchor.seq == 1
        assert other.anchor is None  # one at a time
        exchange.receipt = setting.coordinator.anchor(exchange.anchor)
    with egress.anchoring.exchange() as exchange:
        assert exchange.anchor is not None
        assert exchange.anchor.seq == 4
    assert setting.kinds() == ["opened", "intent", "sent", "receipt"]


def test_a_missing_receipt_is_logged_once(setting: Setting) -> None:
    setting.coordinator.gives_receipts = False
    agent, reregister = setting.reregistering(setting.write_policy())
    with capture_logs() as logs:
        reregister()
        agent.step()
    assert [line["entry"] for line in logs if line["event"] == "ledger.receipt_missing"] == [1]
    assert setting.kinds() == ["opened"]


def test_a_forged_receipt_is_not_kept(setting: Setting) -> None:
    egress = setting.egress()
    with capture_logs() as logs, egress.anchoring.exchange() as exchange:
        receipt = setting.coordinator.anchor(exchange.anchor)
        assert receipt is not None
        exchange.receipt = receipt.model_copy(update={"at": "2020-01-01T00:00:00.000000+00:00"})
    assert logs[-1]["event"] == "ledger.receipt_invalid"
    assert setting.kinds() == ["opened"]
