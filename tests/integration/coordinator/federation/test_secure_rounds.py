"""Secure rounds over REST: the bits of plain fixed point, whichever worker is killed, and what the API receives."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.client import Conflict, Gone, NotFound, Rejected
from fedssl.protocol.policy import AllowRule
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import SecureConfirmation, SecureReveals, SecureVector
from fedssl.protocol.states import Outcome, RoundState
from fedssl.protocol.work import Register, Submit
from fedssl.secure_aggregation import wire
from fedssl.simulation import Result, simulate
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import closing
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerError
from fedssl_worker.disclosure.ledger.verification import read_entries
from support.coordinator import Coordinator
from support.evaluated_runs import evaluated_spec, register_digits
from support.methods import method_spec, shards, simulation_of
from support.recording import RecordingProxy
from support.secure_members import SecureMembers
from support.secure_workers import SECURE_ONLY, SecureWorkers, kill_after
from support.tables import Tables

VICTIM = "client-1"
POINTS = [("write", n) for n in range(1, 7)] + [("send", n) for n in range(1, 6)]
FIXED: dict[str, Any] = {
    "aggregation": {"arithmetic": "fixed", "matrix_bits": 32},
    "partition": {"dataset": "digits", "num_clients": 4, "alpha": 1.0, "max_images": 160},
    "cohort": {"min_clients": 4, "lease_seconds": 60},
    "watch": {"max_divergence": 1e-9, "first_round": 1},  # which every client crosses
}
SECURE: dict[str, Any] = {"secure_aggregation": {"min_cohort": 3, "collusion": 0, "phase_seconds": 30}}
OPEN_RULE = (AllowRule(artifact="weights", methods=("fedu",)),)
EXPIRE = "UPDATE assignments SET lease_expires_at = now() - interval '1 s' WHERE client_id = %s"


def _spec(num_rounds: int, *, secure: bool = True, method: str = "fedbyol") -> RunSpec:
    return method_spec(method, num_rounds=num_rounds, **FIXED, **(SECURE if secure else {}))


def _assert_simulated(workers: SecureWorkers, result: Result) -> None:
    run = workers.coordinator.client.run(workers.id)
    assert run.outcome == Outcome.COMPLETED, run.reason
    assert run.model is not None
    deployed = workers.coordinator.tensors(run.model)
    assert [name for name, value in result.model.items() if not torch.equal(deployed[name], value)] == []
    losses = {m.round_number: m.value for m in workers.coordinator.client.metrics(workers.id, "loss")}
    expected = {record.round_number: record.loss for record in result.history}
    assert losses == {number: loss for number, loss in expected.items() if loss is not None}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("points", [POINTS[1:10:8], [p for p in POINTS if p not in POINTS[1:10:8]]])
def test_a_worker_killed_after_any_write_or_message_continues_with_the_same_bits(
    points: list[tuple[str, int]],
    coordinator: Coordinator,
    tables: Tables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = _spec(len(points))
    workers = SecureWorkers(coordinator, tmp_path, spec)
    kill_after(monkeypatch, workers, VICTIM, dict(enumerate(points, start=1)))
    workers.train()
    _assert_simulated(workers, simulation_of(_spec(len(points), secure=False)))
    ended = workers.events("secure_round.ended")
    assert [event.data["survivors"] for event in ended] == [sorted(shards(spec))] * len(points)
    # No shares and reveals are left, and the next collection removes each masked vector.
    assert tables.query("SELECT client_id FROM secure_members") == []
    words = tables.query("SELECT num_words FROM secure_rounds JOIN rounds ON id = round_id ORDER BY number")
    assert words[0] > words[1] == words[-1]  # when earlier weights are known, most words have 32 bits
    from fedssl_coordinator.storage.retention import collection

    collection.collect()
    vectors = [digest for (digest,) in tables.query("SELECT update_digest FROM assignments")]
    assert len(vectors) == 4 * len(points)
    assert [digest for digest in vectors if (coordinator.store / digest[:2] / digest[2:4] / digest).exists()] == []
    others = workers.clients.keys() - {VICTIM}  # the victim was killed after its last message, and keeps its seed
    for name in others:
        [record] = [json.loads(path.read_text()) for path in (tmp_path / name / "secure").glob("*.json")]
        assert (record["round"], record["seed"]) == (len(points), None)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("at", "phase"), [(("send", 1), "shares"), (("write", 3), "vectors"), (("send", 3), "confirmations")]
)
def test_a_worker_that_does_not_return_is_in_the_sum_only_if_its_vector_arrived(
    at: tuple[str, int],
    phase: Any,
    coordinator: Coordinator,
    tables: Tables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, plain = _spec(1), _spec(1, secure=False)
    with RecordingProxy(coordinator.url) as proxy:
        workers = SecureWorkers(coordinator, tmp_path, spec, {"client-0": proxy.url})
        kill_after(monkeypatch, workers, VICTIM, {1: at})
        workers.train(gone=VICTIM, on_gone=lambda: tables.execute(EXPIRE, VICTIM))
        sent = b"".join(request.body for request in proxy.requests())
    others = sorted(set(shards(spec)) - {VICTIM})
    is_in_sum = phase == "confirmations"
    cohort = {} if is_in_sum else {1: others}
    _assert_simulated(workers, simulate(plain, shards(plain), cohorts=cohort))
    [ended] = workers.events("secure_round.ended")
    assert ended.data["survivors"] == (sorted(shards(spec)) if is_in_sum else others)
    assert ended.data["mask_keys"] == ([VICTIM] if phase == "vectors" else [])
    [closed] = coordinator.client.rounds(workers.id)
    assert closed.secure is not None
    assert (closed.secure.phase, closed.secure.roster) == ("done", ended.data["roster"])
    assert closed.secure.lost == ([] if is_in_sum else [VICTIM])
    assert closed.secure.mask_keys == ended.data["mask_keys"]
    assert closed.secure.own_masks == ended.data["survivors"]
    assert "No cryptographer outside this project has reviewed" in closed.secure.not_promised
    [update] = (tmp_path / "client-0").glob("runs/*/*/update.safetensors")
    _assert_nothing_else_left(update, sent)
    metrics = list(coordinator.client.metrics(workers.id))
    assert {metric.client_id for metric in metrics} == {None}  # means over all images, and counts
    assert {"loss", "num_examples", "num_crossed/divergence"} < {metric.name for metric in metrics}
    [alarm] = workers.events("run.alarm")
    of = f"{len(ended.data['survivors'])} of {len(ended.data['survivors'])} clients"
    assert alarm.message == (
        f"embedding_std is below 0.1 (collapse) at {of}; divergence is above 1e-09 (drift) at {of}"
    )
    view = coordinator.client.client("client-0")
    assert view.num_images is None


def test_the_state_of_a_client_that_declines_after_its_vector_arrived_advances(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update is in the sum: SCAFFOLD's global variate would otherwise differ from the mean of the clients' ones."""
    workers = SecureWorkers(coordinator, tmp_path, _spec(2, method="scaffold"))
    send = Egress.send_secure

    def fail_once(self: Egress, item: Any, message: Any, *arguments: Any) -> None:
        if (item.client_id, item.round_number) == (VICTIM, 1) and isinstance(message, SecureReveals):
            raise LedgerError("the ledger cannot be written")
        send(self, item, message, *arguments)

    monkeypatch.setattr(Egress, "send_secure", fail_once)
    workers.train()
    [declined] = workers.events("assignment.declined")
    assert (declined.client_id, declined.round_number) == (VICTIM, 1)
    assert workers.events("client.state_lost") == []
    assert [view.verdict for view in coordinator.client.rounds(workers.id)] == ["aggregated"] * 2
    spec = _spec(2, secure=False, method="scaffold")
    _assert_simulated(workers, simulate(spec, shards(spec)))


@pytest.mark.full
def test_centroids_leave_without_masks_if_the_policy_permits_it(coordinator: Coordinator, tmp_path: Path) -> None:
    plain, spec = (method_spec("orchestra", **FIXED, **more) for more in ({}, SECURE))
    centroids = AllowRule(artifact="centroids", methods=("*",))
    allowed = SECURE_ONLY.model_copy(update={"allow": (*SECURE_ONLY.allow, centroids)})
    with RecordingProxy(coordinator.url) as proxy:
        workers = SecureWorkers(coordinator, tmp_path, spec, {"client-0": proxy.url})  # allows only masks
        coordinator.advance(workers.id)
        run = coordinator.client.run(workers.id)
        assert run.current_round is None
        assert "centroids may leave only inside a secure aggregation" in (run.reason or "")
        workers.register(allowed)
        workers.train()
        sent = b"".join(request.body for request in proxy.requests())
    _assert_simulated(workers, simulation_of(plain))
    assert coordinator.client.client("client-0").num_images is None
    last = sorted((tmp_path / "client-0").glob("runs/*/*/update.safetensors"))[-1]
    _assert_nothing_else_left(last, sent, but="local_centroids")
    assert load_tensors(last)["local_centroids"].numpy().tobytes() in sent
    entries = [entry.body for entry in read_entries(tmp_path / "client-0" / "ledger") if entry.kind == "intent"]
    assert [entry["without_masks"] for entry in entries] == [["local_centroids"]] * spec.num_rounds


def _assert_nothing_else_left(update: Path, sent: bytes, but: str = "") -> None:
    """Check that no unmasked number, digest of one, metric or number of images is among the bytes that were sent.

    `but`: a tensor that may leave without masks.
    """
    digest = update.parent.name.partition("-")[2]
    assert digest.encode() not in sent
    for name, tensor in load_tensors(update).items():
        if name == but:
            continue
        flat = tensor.flatten().numpy()
        pieces = [flat[start : start + 4].tobytes() for start in range(0, flat.size - 3, 4)]
        assert not any(piece in sent for piece in pieces if any(piece)), name
    for word in (b"num_examples", b"metrics", b"memory_bytes"):
        assert word not in sent
    assert re.search(rb'"(loss|images_per_second|num_images)": *[-0-9]', sent) is None
    assert set(re.findall(rb'"num_steps": *(\d+)', sent)) <= {b"0", b"100"}  # per cent
    note = json.loads((update.parent / "note.json").read_text())
    assert note["metrics"].keys() > {"loss", "divergence", "effective_rank"}
    for value in note["metrics"].values():
        weighted = np.array([round(value * note["num_examples"] * 2**24)], np.int64)
        for form in (repr(value).encode(), np.float64(value).tobytes(), weighted.tobytes()):
            assert form not in sent


def test_a_backup_has_the_secrets_of_its_phase_and_none_of_a_closed_round(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    from fedssl_coordinator.storage.retention import collection

    workers = SecureWorkers(coordinator, tmp_path, _spec(1))
    backups: dict[str, str] = {}

    def back_up() -> None:
        for (phase,) in tables.query("SELECT phase FROM secure_rounds"):
            end = time.monotonic() + 30
            while phase != "done" and tables.query(f"SELECT 1 FROM secure_members WHERE {phase} IS NULL"):
                assert time.monotonic() < end, phase
                time.sleep(0.02)
            backups[phase] = _backup(tables)  # with the messages of all clients

    workers.train(before_advance=back_up)
    back_up()
    assert list(backups) == ["keys", "shares", "vectors", "confirmations", "reveals", "done"]
    sealed = set(re.findall(r'"([0-9a-f]{2364})"', backups["shares"]))
    revealed = set(re.findall(r'"([0-9a-f]{66})"', backups["reveals"]))
    pairs = set(re.findall(r'"([0-9a-f]{2360})"', backups["shares"]))
    assert (len(sealed), len(pairs)) == (4 * 3, 6)
    sealed |= pairs
    assert len(revealed) >= 3 * 4
    keys = set(re.findall(r'"mask_key": "([0-9a-f]{2432})"', backups["keys"]))
    found = {phase: _found(backup, sealed, revealed, keys) for phase, backup in backups.items()}
    assert found == {
        "keys": (False, False, True),
        "shares": (True, False, True),
        "vectors": (True, False, True),
        "confirmations": (True, False, True),
        "reveals": (True, True, True),
        "done": (False, False, False),
    }
    vectors = [digest for (digest,) in tables.query("SELECT update_digest FROM assignments")]
    assert len(vectors) == 4
    collection.collect()
    assert [digest for digest in vectors if (coordinator.store / digest[:2] / digest[2:4] / digest).exists()] == []


def _backup(tables: Tables) -> str:
    """Return each row of each table as text, as a dump does."""
    names = tables.query("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")
    return "\n".join(row for (name,) in names for (row,) in tables.query(f'SELECT t::text FROM "{name}" t')).replace(
        '""', '"'
    )


def _found(backup: str, *secrets: set[str]) -> tuple[bool, ...]:
    return tuple(any(secret in backup for secret in each) for each in secrets)


def test_the_reason_of_a_failed_training_and_the_number_of_images_stay_with_the_client(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    spec = _spec(1).model_copy(update={"data": _spec(1).data.model_copy(update={"distinct_groups": True})})
    workers = SecureWorkers(coordinator, tmp_path, spec)
    coordinator.advance(workers.id)
    workers.agent("client-0").step()  # its images have no groups
    [closed] = coordinator.client.rounds(workers.id)
    [declined] = [each for each in closed.assignments if each.client_id == "client-0"]
    assert declined.state == "declined"
    assert declined.reason == "the training failed (DataError): the worker's log has the reason"
    for policy in (None, SECURE_ONLY.model_copy(update={"allow": (*SECURE_ONLY.allow, *OPEN_RULE)})):
        registration = Register(
            worker_version="test", methods={}, device="cpu", num_images=1, channels=1, image_size=8, policy=policy
        ).model_copy(update={"num_images": None})
        with pytest.raises(Rejected, match=r'the policy also has rules without secure = "required": send the number'):
            workers.clients["client-0"].register(registration)


def test_wrong_messages_are_refused_with_the_reason(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    members = SecureMembers(coordinator, tmp_path, _spec(2))
    names = sorted(members.items)
    first, second, third, last = names
    item = members.items[first]
    with pytest.raises(NotFound):
        members.workers.clients[first].secure_status(uuid4())
    with pytest.raises(NotFound):  # another client's assignment
        members.workers.clients[second].send_secure(item.assignment_id, members.keys(first))
    with pytest.raises(Gone, match="belongs to the phase confirmations, and the round is in the phase keys"):
        members.send(first, SecureConfirmation(signature="00" * 64))
    low_order = members.keys(first).model_copy(update={"mask_key": "00" * 1216})
    with pytest.raises(Rejected, match="did not sign these keys"):
        members.send(first, low_order)
    with pytest.raises(Rejected, match="did not sign these keys"):  # the keys of another client
        members.send(first, members.keys(second))
    assert not members.workers.clients[first].secure_status(item.assignment_id).received
    for _ in range(2):  # a repeated message is accepted
        answer = members.send(first, members.keys(first))
        assert (answer.phase, answer.received) == ("keys", True)
    shown = members.shown()
    assert (shown.phase, shown.awaited, shown.lost) == ("keys", [second, third, last], [])
    with pytest.raises(Conflict, match="another message"):
        members.send(first, wire.keys_to_wire(members.client(first).announcement))
    with pytest.raises(Conflict, match="has secure aggregation"):  # an update without masks
        members.workers.clients[first].submit(Submit(assignment_id=item.assignment_id, update="0" * 64, num_examples=1))
    for name in (second, third):
        members.send(name, members.keys(name))
    coordinator.client.pause(members.workers.id)
    tables.execute("UPDATE secure_rounds SET deadline = now()")
    coordinator.client.resume(members.workers.id)  # no client could claim meanwhile: the phase begins again
    coordinator.advance(members.workers.id)
    assert members.shown().phase == "keys"
    tables.execute("UPDATE secure_rounds SET deadline = now()")
    coordinator.advance(members.workers.id)
    with pytest.raises(Gone, match="came too late"):  # the roster is frozen
        members.send(last, members.keys(last))
    shown = members.shown()
    assert (shown.phase, shown.awaited, shown.lost) == ("shares", [first, second, third], [last])
    assert (shown.min_survivors, shown.own_masks, shown.mask_keys, shown.roster) == (3, [], [], None)
    status = members.workers.clients[first].secure_status(item.assignment_id)
    assert (status.phase, sorted(status.roster or {})) == ("shares", [first, second, third])
    shares = wire.shares_to_wire(members.secure[first].share(wire.roster_from_wire(status.roster or {})))
    with pytest.raises(Rejected, match="one sealed share to each of its neighbours"):
        members.send(first, shares.model_copy(update={"boxes": {}}))
    members.send(first, shares)
    with pytest.raises(Conflict, match="upload it with PUT first"):
        members.send(first, SecureVector(update="0" * 64, signature="00" * 64))
    for name in (second, third):
        tables.execute(EXPIRE, name)
    coordinator.advance(members.workers.id)  # two clients are lost: there is no sum, and the round is skipped
    [closed] = [view for view in coordinator.client.rounds(members.workers.id) if view.number == 1]
    assert closed.verdict == "skipped"
    assert closed.reason is not None
    assert "no secure sum: 1 client sent shares" in closed.reason
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.federation.rounds import repository

    with transaction() as session:  # the next round has words of 64 bits
        assert not repository.gave_weights(session, members.workers.id, 1)
    assert tables.query("SELECT phase FROM secure_rounds JOIN rounds ON id = round_id WHERE number = 1") == [
        ("failed",)
    ]
    with pytest.raises(Gone):
        members.send(first, shares)
    assert members.status(first).phase == "failed"  # no message is awaited any more
    assert tables.query("SELECT kind FROM events WHERE kind = 'secure_message.refused'") != []


def test_a_client_whose_identity_key_changed_is_left_out_until_it_is_confirmed(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    workers = SecureWorkers(coordinator, tmp_path, _spec(1))
    other = workers.identities["client-2"].public_key().public_bytes_raw().hex()
    coordinator.worker("client-x")
    tables.execute("UPDATE clients SET identity = %s WHERE id = 'client-x'", other)  # as an earlier version allowed
    coordinator.advance(workers.id)
    run = coordinator.client.run(workers.id)
    assert run.reason is not None
    assert "client-2, client-x: another client has announced the same identity key" in run.reason
    coordinator.client.revoke_client("client-x")
    coordinator.worker(VICTIM, identity="ab" * 32)
    coordinator.advance(workers.id)
    run = coordinator.client.run(workers.id)
    assert run.reason is not None
    assert f"its identity key has changed: fedssl client confirm-identity {VICTIM} {'ab' * 32}" in run.reason
    changed = "SELECT client_id FROM events WHERE kind = 'client.identity_changed'"
    assert tables.query(changed) == [(VICTIM,)]
    coordinator.client.confirm_identity(VICTIM, "ab" * 32)
    coordinator.advance(workers.id)
    assert coordinator.client.run(workers.id).current_round is not None


@pytest.mark.changes_states
def test_the_key_of_another_client_is_refused_and_excludes_no_other_client(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """A new client that announced another client's key once kept both of them out of secure rounds."""
    workers = SecureWorkers(coordinator, tmp_path, _spec(1))
    victim = workers.identities[VICTIM].public_key().public_bytes_raw().hex()
    coordinator.worker("liar", identity="cd" * 32)
    for name in ("new", "liar"):
        with pytest.raises(Conflict, match=r"another client of this project has .* delete its file identity\.pem"):
            coordinator.worker(name, identity=victim)
    refused = "SELECT client_id, data ->> 'client' FROM events WHERE kind = 'client.identity_refused' ORDER BY id"
    assert tables.query(refused) == [("new", VICTIM), ("liar", VICTIM)]
    coordinator.worker(VICTIM, identity="ab" * 32)
    with pytest.raises(Conflict):  # this also holds for an announced key that is not confirmed yet
        coordinator.worker("new", identity="ab" * 32)
    coordinator.worker(VICTIM, identity=victim)
    coordinator.client.revoke_client("liar")
    coordinator.worker("new", identity="cd" * 32)  # an owner who was enrolled again keeps its folder
    coordinator.advance(workers.id)
    [opened] = coordinator.client.rounds(workers.id)
    assert {each.client_id for each in opened.assignments} == {*workers.identities, "new"}


def test_only_one_of_several_clients_that_announce_one_key_at_once_is_accepted(coordinator: Coordinator) -> None:
    def announce(name: str) -> bool:
        try:
            coordinator.worker(name, identity="ef" * 32)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(announce, [f"site-{number}" for number in range(6)])).count(True) == 1


@pytest.mark.full(but=1)
@pytest.mark.changes_states
@pytest.mark.parametrize("names", [("num_words",), ("num_words64", "num_words32")], ids=["old", "between"])
def test_a_secure_round_that_an_earlier_version_opened_continues(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Versions until 27 November 2026 stored the last two names, and some of that day only the first one."""
    workers = SecureWorkers(coordinator, tmp_path, _spec(1))
    coordinator.advance(workers.id)
    for name in names:
        tables.execute(f"UPDATE secure_rounds SET facts = facts::jsonb #- '{{context,{name}}}'")
    workers.train()
    _assert_simulated(workers, simulation_of(_spec(1, secure=False)))


@pytest.mark.changes_states
def test_a_value_out_of_range_ends_only_a_secure_round_with_words_of_32_bits(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    workers = SecureWorkers(coordinator, tmp_path, _spec(2))
    coordinator.advance(workers.id)
    item = workers.clients[VICTIM].claim(0)
    assert item is not None
    workers.clients[VICTIM].decline(item.assignment_id, "out of range: encoder.x: a value does not fit into its word")
    coordinator.advance(workers.id)
    [current] = coordinator.client.rounds(workers.id)
    assert current.state == RoundState.OPEN, "the first round has words of 64 bits, and continues without the client"
    tables.execute("UPDATE secure_rounds SET facts = jsonb_set(facts::jsonb, '{context,total_bits}', '[11, 3]')")
    coordinator.advance(workers.id)
    closed = next(iter(coordinator.client.rounds(workers.id)))
    assert closed.verdict == "skipped"
    assert closed.reason == f"{VICTIM}: out of range: encoder.x: a value does not fit into its word"
    # A failed round of a run that was resumed gives no weights either: no client's state advances in it.
    tables.execute("UPDATE rounds SET verdict = 'failed' WHERE number = 1")
    tables.execute(
        "UPDATE assignments SET state = 'accepted', update_digest = (SELECT max(digest) FROM artifacts), "
        "num_examples = 1 WHERE client_id = %s AND round_number = 1",
        VICTIM,
    )
    for _ in range(2):  # claimed, and then resumed
        item = workers.clients[VICTIM].claim(0)
        assert item is not None
        assert (item.round_number, item.last_accepted) == (2, None)


def test_a_run_that_failed_in_its_last_round_is_evaluated_when_it_is_resumed(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    register_digits(coordinator.client, tmp_path)
    workers = SecureWorkers(
        coordinator, tmp_path, _spec(1).model_copy(update={"evaluation": evaluated_spec().evaluation})
    )
    coordinator.advance(workers.id)
    with transaction() as session:
        run = run_rows.locked(session, workers.id)
        assert run is not None
        closing.end_run(session, run, Outcome.FAILED, "the updates cannot be aggregated")
    coordinator.client.resume(workers.id)
    coordinator.advance(workers.id)
    ended = coordinator.client.run(workers.id)
    assert ended.outcome == Outcome.COMPLETED
    assert ended.reason == "the only round is closed, without new weights (1 failed)"
    assert [row.round_number for row in coordinator.client.evaluations(workers.id)] == [0, 1]
