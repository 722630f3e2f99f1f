"""Clients of a secure round that lie, over REST: the sum is right without them, or the round is skipped with a reason.

What a lying coordinator can obtain is tested in tests/property/test_lying_coordinator.py and tests/unit/worker.
"""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import RootModel

from fedssl.client import Conflict, Gone, Rejected
from fedssl.engine.summed_metrics import NUM_WORDS
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import SECURE_BYTES, SECURE_PROTOCOL, SecureStatus
from fedssl.secure_aggregation import Refused
from fedssl.secure_aggregation.messages import KeyAnnouncement
from fedssl.simulation import simulate
from support.coordinator import Coordinator
from support.methods import method_spec, shards
from support.secure_members import SecureMembers
from support.tables import Tables

EXPIRE = "UPDATE assignments SET lease_expires_at = now() - interval '1 s' WHERE client_id = %s"


def _spec(*, secure: bool = True, **changes: Any) -> RunSpec:
    masks: dict[str, Any] = {"secure_aggregation": {"min_cohort": 3, "collusion": 0, "phase_seconds": 60}}
    return method_spec(
        "fedbyol",
        num_rounds=1,
        aggregation={"arithmetic": "fixed"},
        partition={"dataset": "digits", "num_clients": 4, "alpha": 1.0, "max_images": 160},
        cohort={"min_clients": 4, "lease_seconds": 60},
        **(masks if secure else {}),
        **changes,
    )


def _with_low_order(members: SecureMembers, name: str) -> Any:
    """Return keys with which all clients would share the secret 0, signed by their owner."""
    secure = members.secure[name]
    good = secure.announcement
    mask_key = bytes(32) + good.mask_key[32:]
    keys = KeyAnnouncement(name, good.encryption_key, mask_key, good.commitment, b"")
    signature = members.workers.identities[name].sign(keys.signed_bytes(secure._digest))
    return members.keys(name).model_copy(update={"mask_key": mask_key.hex(), "signature": signature.hex()})


def _until_vectors(members: SecureMembers, unusable: tuple[str, str] | None = None, kind: str = "boxes") -> None:
    """Complete the first two phases. `unusable`: who sends whom a garbage share, or pair secret (`pairs`)."""
    for name in members.items:
        assert not members.needs_attention()
        members.send(name, members.keys(name))
    assert members.needs_attention()
    members.advance()
    for name in members.items:
        assert not members.needs_attention()
        shares = members.share(name)
        if unusable is not None and name == unusable[0]:
            changed = {**getattr(shares, kind), unusable[1]: "00" * {"boxes": 1182, "pairs": 1180}[kind]}
            shares = shares.model_copy(update={kind: changed})
        members.send(name, shares)
    assert members.needs_attention()
    members.advance()
    assert not members.needs_attention()


def test_refused_messages_and_an_unusable_share_do_not_change_the_sum(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.core import enqueue
    from fedssl_coordinator.storage.retention import collection

    enqueued = list[Any]()  # by the last message of each phase
    members = SecureMembers(coordinator, tmp_path, _spec())
    first, second, third, last = names = sorted(members.items)
    with pytest.raises(Rejected, match="the X25519 public key has low order"):
        members.send(first, _with_low_order(members, first))
    monkeypatch.setattr(enqueue, "advance", lambda session, run_id: enqueued.append(run_id))
    _until_vectors(members, unusable=(second, first))
    assert len(enqueued) == 2
    words = {name: members.words(name) for name in names}
    vectors = {name: members.masked(name, words[name]) for name in names}
    for name in names:
        members.send(name, vectors[name])
        members.send(name, vectors[name])  # a repeated message is accepted
    assert (len(enqueued), members.needs_attention()) == (3, True)
    shown = members.shown()
    assert (shown.own_masks, shown.mask_keys) == ([], [])  # nothing is revealed before the last phase
    sent = words[first]
    second_vector = members.uploaded(first, np.append(sent, sent[:1]), bytes.fromhex(vectors[first].signature))
    with pytest.raises(Conflict, match="another message of this client for this phase was already accepted"):
        members.send(first, second_vector)
    members.advance()
    assert not members.needs_attention()
    unsigned = vectors[first].model_copy(update={"signature": "00" * 64})
    with pytest.raises(Conflict, match="another message of this client for this phase was already accepted"):
        members.send(first, unsigned)
    for name in names:
        members.confirm(name)
    assert (len(enqueued), members.needs_attention()) == (4, True)
    members.advance()
    assert not members.needs_attention()
    answers = {name: members.reveals(name) for name in names}
    wrong = {**answers[third].self_shares, last: "00" * 33}
    with pytest.raises(Rejected, match=f"{third} sent a wrong share of {last}"):
        members.send(third, answers[third].model_copy(update={"self_shares": wrong}))
    both = answers[third].model_copy(update={"mask_shares": {last: answers[third].self_shares[last]}})
    with pytest.raises(Rejected, match="must reveal a share of the own mask of each survivor"):  # both kinds of a share
        members.send(third, both)
    assert answers[first].unusable == (second,)
    for name in names:
        members.send(name, answers[name])
    assert members.needs_attention()
    # A client that gives its work back now is in the sum, and a collection leaves its vector in the store.
    members.workers.clients[last].decline(members.items[last].assignment_id, "its machine fails")
    collection.collect()
    members.advance()
    [aggregating] = members.workers.events("round.aggregating")
    assert aggregating.message == "aggregating 4 of 4 updates"
    plain = _spec(secure=False)
    expected, run = simulate(plain, shards(plain)).model, coordinator.client.run(members.workers.id)
    assert run.model is not None
    found = coordinator.tensors(run.model)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_forged_words_and_a_late_vector_lead_to_a_skipped_round(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    members = SecureMembers(coordinator, tmp_path, _spec())
    first, second, third, last = names = sorted(members.items)
    _until_vectors(members)
    words = members.words(first)
    vectors = {name: members.masked(name, words) for name in names}
    for name in (first, second):
        members.send(name, vectors[name])
    own = members.uploaded(third, np.arange(words.size + 1, dtype=np.uint64), bytes(64))
    members.send(third, own.model_copy(update={"signature": vectors[third].signature}))
    tables.execute(EXPIRE, last)
    members.advance()
    with pytest.raises(Gone, match="came too late"):
        members.send(last, vectors[last])
    for name in (first, second, third):
        members.confirm(name)
    members.advance()
    for name in (first, second, third):
        members.send(name, members.reveals(name))
    members.advance()
    [closed] = coordinator.client.rounds(members.workers.id)
    assert closed.verdict == "skipped"
    assert closed.reason == "no secure sum: masks_do_not_cancel: some client used other masks than those of this round"
    assert coordinator.client.run(members.workers.id).outcome == "completed"


def test_an_unusable_pair_secret_skips_the_round_and_names_its_sender(coordinator: Coordinator, tmp_path: Path) -> None:
    members = SecureMembers(coordinator, tmp_path, _spec())
    first, second, third, last = names = sorted(members.items)
    _until_vectors(members, unusable=(first, second), kind="pairs")
    words = members.words(first)
    vectors = {name: members.masked(name, words) for name in (first, third, last)}
    why = f"{first} sealed a pair secret for {second} that {second} cannot open"
    with pytest.raises(Refused, match=why):
        members.masked(second, words)
    members.workers.clients[second].decline(members.items[second].assignment_id, why)
    for name, vector in vectors.items():
        members.send(name, vector)
    members.advance()
    for name in vectors:
        members.confirm(name)
    members.advance()
    for name in vectors:
        members.send(name, members.reveals(name))
    members.advance()
    [closed] = coordinator.client.rounds(members.workers.id)
    assert (closed.verdict, closed.reason) == ("skipped", f"no secure sum: {why}")
    assert len(names) == 4


def test_another_version_of_the_protocol_is_refused_with_the_side_to_upgrade(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    members = SecureMembers(coordinator, tmp_path, _spec())
    first, second = sorted(members.items)[:2]
    assert members.items[first].secure_protocol == SECURE_PROTOCOL
    client = members.workers.clients[first]
    for version, older in ((None, "worker"), (1, "worker"), (SECURE_PROTOCOL + 1, "coordinator")):
        body: dict[str, Any] = {"assignment_id": str(members.items[first].assignment_id), "message": {"phase": "keys"}}
        body |= {} if version is None else {"protocol": version}
        speaks = f"the worker speaks version {version or 1} of secure aggregation, and the coordinator version"
        with pytest.raises(Rejected, match=f"{speaks} {SECURE_PROTOCOL}: upgrade the {older}"):
            client._connection.call("POST", "/v1/work/secure/send", SecureStatus, body=RootModel[dict[str, Any]](body))
    # The coordinator was upgraded in the middle of a round: messages of the older version cannot be read.
    members.send(first, members.keys(first))
    tables.execute("UPDATE secure_rounds SET facts = facts - 'protocol'")
    tables.execute("""UPDATE secure_members SET keys = '{"phase": "keys", "mask_key": "00"}' WHERE keys IS NOT NULL""")
    with pytest.raises(Gone, match="belongs to the phase keys, and the round is in the phase failed"):
        members.send(second, members.keys(second))
    assert members.status(first).phase == "failed"
    assert members.shown().phase == "keys"
    members.advance()
    [closed] = coordinator.client.rounds(members.workers.id)
    assert closed.verdict == "skipped"
    assert closed.reason is not None
    assert "another version of fedssl, with another version of secure aggregation, has begun the round" in closed.reason


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("weight", "why"), [(200, "robustness.max_examples allows 160"), (-500, "must be positive")])
def test_a_weight_above_its_limit_or_below_zero_leads_to_a_skipped_round(
    weight: int, why: str, coordinator: Coordinator, tmp_path: Path
) -> None:
    members = SecureMembers(coordinator, tmp_path, _spec(robustness={"max_examples": 40}))
    _until_vectors(members)
    words, liar = members.words(min(members.items)), max(members.items)
    assert 0 < int(words[NUM_WORDS]) <= 40
    lying = words.copy()
    lying[NUM_WORDS] = np.int64(weight).view(np.uint64)
    for name in members.items:
        members.send(name, members.masked(name, lying if name == liar else words))
    members.advance()
    for name in members.items:
        members.confirm(name)
    members.advance()
    for name in members.items:
        members.send(name, members.reveals(name))
    members.advance()
    [closed] = coordinator.client.rounds(members.workers.id)
    assert closed.verdict == "skipped"
    assert closed.reason is not None
    assert closed.reason.startswith("no secure sum: the sum cannot be used: the weights of 4 clients add up to")
    assert why in closed.reason
    assert coordinator.client.run(members.workers.id).outcome == "completed"


def test_a_message_that_is_too_large_is_refused(coordinator: Coordinator) -> None:
    headers = {"Authorization": f"Bearer {coordinator.operator_token}", "Content-Type": "application/json"}
    answer = httpx.post(
        f"{coordinator.url}/v1/work/secure/send", content=b" " * (SECURE_BYTES + 1), headers=headers, timeout=60
    )
    assert answer.status_code == 413
