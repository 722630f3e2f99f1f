"""Anchors of the clients' ledgers: kept permanently, with signed receipts, and contradictions are reported."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedssl.client import NotFound, Rejected, WorkerClient
from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor, SentBroadcast, receipt_message
from fedssl.protocol.work import Register, Submit
from fedssl_coordinator.federation.ledger_anchors.service import _hour
from support.coordinator import Coordinator
from support.federation import tensors_for, upload
from support.scenario import Scenario
from support.tables import Tables

KEY, OTHER_KEY = "a" * 64, "b" * 64


def anchor(seq: int, head: str = "", key: str = KEY) -> LedgerAnchor:
    return LedgerAnchor(key=key, seq=seq, head=head or f"{seq:064x}")


@pytest.fixture
def worker(coordinator: Coordinator) -> WorkerClient:
    return coordinator.worker("a")


def sent(worker: WorkerClient, *anchors: LedgerAnchor) -> list[AnchorReceipt | None]:
    return [worker.heartbeat(anchor=one).receipt for one in anchors]


def contradictions(tables: Tables) -> list[tuple[str, dict[str, Any]]]:
    return [(event.kind, event.data) for event in tables.events_after(0) if event.kind.startswith("ledger.")]


def kept(coordinator: Coordinator, client_id: str = "a") -> list[tuple[int, bool]]:
    return [(view.seq, view.is_consistent) for view in coordinator.client.ledger_anchors(client_id)]


def assert_genuine(receipt: AnchorReceipt | None, about: LedgerAnchor, client_id: str = "a") -> None:
    assert receipt is not None
    assert (receipt.client_id, receipt.seq, receipt.head) == (client_id, about.seq, about.head)
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(receipt.coordinator))
    public.verify(bytes.fromhex(receipt.signature), receipt_message(client_id, about, receipt.at, receipt.sent))


def test_a_receipt_is_signed_and_repeated_for_the_same_anchor(worker: WorkerClient, coordinator: Coordinator) -> None:
    first, again = sent(worker, anchor(1), anchor(1))
    assert first == again
    assert_genuine(first, anchor(1))
    (later,) = sent(worker, anchor(4))
    assert_genuine(later, anchor(4))
    assert first is not None
    assert later is not None
    assert first.coordinator == later.coordinator
    assert kept(coordinator) == [(1, True), (4, True)]


def test_without_an_anchor_there_is_no_receipt(worker: WorkerClient, coordinator: Coordinator) -> None:
    assert worker.heartbeat().receipt is None
    assert kept(coordinator) == []


def test_registrations_and_submissions_carry_anchors_too(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "a")
    introduction = Register(
        worker_version="test", methods={}, device="cpu", num_images=9, channels=1, image_size=8, anchor=anchor(1)
    )
    assert_genuine(scenario.workers["a"].register(introduction).receipt, anchor(1))
    item = scenario.claim("a")
    digest = upload(scenario.workers["a"], item, tensors_for(item.plan.update), tmp_path)
    submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=3, anchor=anchor(3))
    first = scenario.workers["a"].submit(submission).receipt
    assert_genuine(first, anchor(3))
    assert first is not None
    assert first.sent == SentBroadcast(run=item.run_id, round=1, broadcast=item.broadcast)
    with coordinator.http(coordinator.worker_token("a")) as http:
        older = http.post("/v1/work/submit", json=submission.model_dump(mode="json")).json()
    assert "sent" not in older["receipt"]  # an older worker would not understand it
    assert scenario.workers["a"].submit(submission).receipt == first  # the first answer may have been lost
    assert kept(coordinator) == [(1, True), (3, True)]


def test_a_smaller_entry_is_reported(worker: WorkerClient, coordinator: Coordinator, tables: Tables) -> None:
    receipts = sent(worker, anchor(5), anchor(7), anchor(6), anchor(5))
    assert [receipt is not None for receipt in receipts] == [True, True, False, False]
    [(cut, data), (restored, _)] = contradictions(tables)
    assert cut == restored == "ledger.went_back"
    assert data["anchor"]["seq"] == 6
    assert data["known"] == {"key": KEY, "seq": 7, "head": anchor(7).head}
    assert kept(coordinator) == [(5, True), (7, True), (6, False)]
    message = tables.one("SELECT message FROM events WHERE kind = 'ledger.went_back' ORDER BY id LIMIT 1")
    assert message == "a: its ledger went back from entry 7 to 6: it was cut, or restored from a copy"


def test_another_hash_for_an_entry_is_reported_once(
    worker: WorkerClient, coordinator: Coordinator, tables: Tables
) -> None:
    forged = anchor(7, "f" * 64)
    assert sent(worker, anchor(7), forged, forged)[1:] == [None, None]
    [(kind, data)] = contradictions(tables)
    assert kind == "ledger.forked"
    assert (data["anchor"]["head"], data["known"]["head"]) == (forged.head, anchor(7).head)
    assert kept(coordinator) == [(7, True), (7, False)]
    assert_genuine(sent(worker, anchor(8))[0], anchor(8))  # later anchors are still recorded


def test_a_new_ledger_is_reported(worker: WorkerClient, coordinator: Coordinator, tables: Tables) -> None:
    new = anchor(1, key=OTHER_KEY)
    for receipt, about in zip(sent(worker, anchor(7), new, anchor(2, key=OTHER_KEY)),
                              (anchor(7), new, anchor(2, key=OTHER_KEY)), strict=True):  # fmt: skip
        assert_genuine(receipt, about)
    [(kind, data)] = contradictions(tables)
    assert kind == "ledger.replaced"
    assert (data["anchor"]["key"], data["known"]["key"]) == (OTHER_KEY, KEY)


def test_every_client_has_its_own_record(coordinator: Coordinator, tables: Tables) -> None:
    one, other = coordinator.worker("a"), coordinator.worker("b")
    sent(one, anchor(9))
    assert_genuine(sent(other, anchor(3))[0], anchor(3), "b")
    assert contradictions(tables) == []
    assert (kept(coordinator, "a"), kept(coordinator, "b")) == ([(9, True)], [(3, True)])


def test_one_of_several_concurrent_contradicting_anchors_is_confirmed(
    worker: WorkerClient, coordinator: Coordinator
) -> None:
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda head: worker.heartbeat(anchor=anchor(5, head * 64)).receipt, "01234567"))
    assert sum(receipt is not None for receipt in receipts) == 1
    assert sorted(is_consistent for _, is_consistent in kept(coordinator)) == [False] * 7 + [True]


def test_all_processes_share_one_signing_key_which_is_never_shown(coordinator: Coordinator, tables: Tables) -> None:
    with ThreadPoolExecutor(8) as pool:
        workers = [coordinator.worker(name) for name in "abcdefgh"]
        receipts = [r for (r,) in pool.map(lambda worker: sent(worker, anchor(1)), workers) if r is not None]
    assert len(receipts) == 8
    assert len({receipt.coordinator for receipt in receipts}) == 1
    private = tables.one("SELECT private_key FROM signing_keys")
    with coordinator.http() as http:
        shown = "".join(http.get(path).text for path in ("/v1/clients", "/v1/clients/a/ledger-anchors", "/metrics"))
    assert private not in shown
    assert private not in "".join(receipt.model_dump_json() for receipt in receipts)


@pytest.mark.parametrize("change", [{"seq": 0}, {"seq": 2**53}, {"head": "x"}, {"key": "A" * 64}, {"more": 1}])
def test_an_invalid_anchor_is_refused(worker: WorkerClient, coordinator: Coordinator, change: dict[str, Any]) -> None:
    values = {**anchor(1).model_dump(), **change}
    secret = coordinator.worker_token("a")
    with coordinator.http(secret) as http:
        answer = http.post("/v1/work/heartbeat", json={"anchor": values})
    assert answer.status_code == 422
    assert f"anchor.{next(iter(change))}" in answer.json()["detail"]


def test_anchors_are_listed_in_pages_and_only_for_operators(worker: WorkerClient, coordinator: Coordinator) -> None:
    sent(worker, *(anchor(seq) for seq in range(1, 6)))
    path = "/v1/clients/a/ledger-anchors"
    with coordinator.http() as http:
        first = http.get(path, params={"limit": 2}).json()
        rest = http.get(path, params={"limit": 100, "cursor": first["next_cursor"]}).json()
    assert [item["seq"] for item in first["items"] + rest["items"]] == [1, 2, 3, 4, 5]
    with coordinator.http(coordinator.worker_token("a")) as http:
        assert http.get(path).status_code == 403
    with pytest.raises(NotFound, match="no client nobody"):
        list(coordinator.client.ledger_anchors("nobody"))


def test_a_contradicting_anchor_refuses_no_work_and_a_refused_request_keeps_no_anchor(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "a")
    worker = scenario.workers["a"]
    sent(worker, anchor(7))
    item = scenario.claim("a")
    digest = upload(worker, item, tensors_for(item.plan.update), tmp_path)
    submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=3, anchor=anchor(2))
    submitted = worker.submit(submission)
    assert submitted.state == "accepted"
    assert submitted.receipt is None
    with pytest.raises(Rejected):
        worker.register(
            Register(
                protocol_version=99,
                worker_version="test",
                methods={},
                device="cpu",
                num_images=9,
                channels=1,
                image_size=8,
                anchor=anchor(8),
            )
        )
    assert kept(coordinator) == [(7, True), (2, False)]


def test_the_anchors_and_contradictions_of_a_client_are_limited(
    worker: WorkerClient, coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedssl_coordinator.federation.ledger_anchors.service._MOST_CONTRADICTIONS", 5)
    monkeypatch.setattr("fedssl_coordinator.federation.ledger_anchors.service._MOST_ANCHORS", 3)
    _hour.cache_clear()
    new = [anchor(7, key=f"{number:064x}") for number in range(4)]
    assert None not in sent(worker, *new)
    assert sent(worker, anchor(6, key=new[0].key), anchor(6, key=new[0].key), anchor(1)) == [None] * 3
    assert len(contradictions(tables)) == 4  # three replaced ledgers, and one that went back
    assert len(kept(coordinator)) == 5
    growing = [anchor(seq, key=new[0].key) for seq in (8, 9, 10, 11, 10)]
    assert [receipt is not None for receipt in sent(worker, *growing)] == [True, True, True, False, True]
    assert len(kept(coordinator)) == 8
    assert_genuine(sent(coordinator.worker("b"), anchor(1))[0], anchor(1), "b")
