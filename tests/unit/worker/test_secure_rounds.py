"""A worker in secure rounds of a dishonest coordinator refuses, records the reason, and sends nothing more."""

import json
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.errors import Cancelled
from fedssl.protocol.secure_work import (
    SECURE_PROTOCOL,
    SecureConfirmation,
    SecureKeys,
    SecureMember,
    SecurePhase,
    SecureReveals,
    SecureShares,
    SecureStatus,
    SecureVector,
)
from fedssl.secure_aggregation import OwnerLimits, SecureClient, SecureServer, Words, wire
from fedssl.secure_aggregation.round_context import round_context
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.disclosure.ledger.verification import read_entries
from fedssl_worker.disclosure.policy import NotPermitted, PolicyEnforcer
from fedssl_worker.secure_rounds import SecureRounds
from fedssl_worker.state import ClientStates, Finished
from fedssl_worker.state_gc import StateCollector

from .conftest import CLIENT, good_update, make_item, make_spec

SECURE: dict[str, Any] = {
    "aggregation": {"arithmetic": "fixed"},
    "secure_aggregation": {"min_cohort": 3, "collusion": 0},
}
OTHERS = ("hospital-b", "hospital-c", "hospital-d")
POLICY = """
schema = 1
client = "hospital-a"
coordinator = "http://coordinator"
[[allow]]
artifact = "weights"
methods = ["*"]
secure = "required"
[secagg]
"""
Lie = Callable[[SecureStatus], SecureStatus]


class Cohort:
    """An in-memory coordinator of one round with three honest clients. `lies` change what the worker receives."""

    url = "http://coordinator"
    policy = POLICY

    def __init__(
        self,
        folder: Path,
        *,
        names: tuple[str, ...] = (CLIENT, *OTHERS),
        identities: dict[str, Ed25519PrivateKey] | None = None,
    ) -> None:
        self.folder = folder
        self.identities = identities or {name: Ed25519PrivateKey.generate() for name in names}
        members = [
            SecureMember(client=name, identity=key.public_key().public_bytes_raw().hex())
            for name, key in self.identities.items()
        ]
        self.item = make_item(make_spec(**SECURE), 3, secure_cohort=members)
        self.context = self.context_of(3)
        self.server = SecureServer(self.context)
        self.others = {
            name: SecureClient(self.context, name, self.identities[name], OwnerLimits()) for name in names[1:]
        }
        self.words = np.arange(5, dtype=np.uint64)
        self.sent: list[Any] = []
        self.lies: dict[str, Lie] = {}
        self._shown: dict[str, Any] = {}
        update = folder / "update.safetensors"
        save_tensors(good_update(), update)
        self.finished = Finished(update, digest_of(update), 10, {})

    def context_of(self, number: int, broadcast: str = "0" * 64) -> Any:
        item = self.item
        assert item.secure_cohort is not None
        return round_context(
            str(item.run_id), number, spec=item.spec, plan=item.plan, broadcast=broadcast,
            frozen=None, num_words=5,
            cohort=item.secure_cohort,
        )  # fmt: skip

    def worker(self, policy: str = "") -> SecureRounds:
        """Return a worker's part in secure rounds, as a newly started process would make it."""
        path = self.folder / "policy.toml"
        path.write_text(self.policy + policy)
        self.egress = Egress(self, Ledger(self.folder / "ledger"), PolicyEnforcer(path, self.url))  # type: ignore[arg-type]
        states = ClientStates(self.folder / "runs")
        return SecureRounds(self, self.egress, states, self.folder / "secure", self.identities[CLIENT])  # type: ignore[arg-type]

    def take_part(self, policy: str = "", words: Words | None = None) -> None:
        """Take part in the whole round."""
        part = self.worker(policy).begin(self.item, self.context)
        with part.agreeing():
            time.sleep(0.05)  # it trains
        part.finish(self.finished, self.words if words is None else words, lambda: None)

    def secure_status(self, assignment_id: UUID) -> SecureStatus:
        phase = "done" if self.server.phase == "reveals" and self._has(SecureReveals) else self.server.phase
        status = SecureStatus(phase=phase, is_member=True, received=False, **self._shown)
        return self.lies.get(phase, lambda it: it)(status)

    def upload(self, digest: str, source: Path, assignment_id: UUID, on_bytes: Any = None) -> int:
        assert digest_of(source) == digest
        return source.stat().st_size

    def send_secure(self, assignment_id: UUID, message: Any) -> None:
        self.sent.append(message)
        server, others = self.server, self.others
        match message:
            case SecureKeys():
                server.add_keys(wire.keys_from_wire(CLIENT, message))
                for client in others.values():
                    server.add_keys(client.announcement)
                self.roster = server.freeze_keys()
                self._shown = {"roster": {keys.client: wire.keys_to_wire(keys) for keys in self.roster}}
            case SecureShares():
                server.add_shares(wire.shares_from_wire(CLIENT, message))
                for client in others.values():
                    server.add_shares(client.share(self.roster))
                self.inboxes = server.freeze_shares()
                self._shown = {"inbox": wire.inbox_to_wire(self.inboxes[CLIENT])}
            case SecureVector():
                server.record_vector(CLIENT, bytes.fromhex(message.update), bytes.fromhex(message.signature))
                for name, client in others.items():
                    server.add_vector(client.mask(self.inboxes[name], self.words))
                self.survivors = server.freeze_vectors()
                self._shown = {"survivors": {name: it.hex() for name, it in self.survivors.signatures.items()}}
            case SecureConfirmation():
                server.add_confirmation(wire.confirmation_from_wire(CLIENT, message))
                for client in others.values():
                    server.add_confirmation(client.confirm(self.survivors))
                self._shown["confirmations"] = {it.client: it.signature.hex() for it in server.freeze_confirmations()}
            case SecureReveals():
                server.add_reveals(wire.reveals_from_wire(CLIENT, message))

    def ended_runs(self, run_ids: Collection[UUID]) -> set[UUID]:
        return set(run_ids)

    def _has(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.sent)

    def kinds_sent(self) -> list[str]:
        return [message.phase for message in self.sent]

    def ledger(self) -> list[dict[str, Any]]:
        return [entry.body for entry in read_entries(self.folder / "ledger")]


def test_an_honest_round_is_completed_and_recorded_in_the_ledger(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.take_part("min_cohort = 3\n")
    assert cohort.kinds_sent() == ["keys", "shares", "vectors", "confirmations", "reveals"]
    entries = {body["kind"]: body for body in cohort.ledger()}
    roster = cohort.server.roster_digest
    assert roster is not None
    for kind in ("intent", "revealed"):
        assert (entries[kind]["roster"], entries[kind]["threshold"]) == (roster.hex(), 3)
        assert entries[kind]["cohort"] == [CLIENT, *OTHERS]
    vector = next(message for message in cohort.sent if isinstance(message, SecureVector))
    assert entries["intent"]["digest"] == entries["sent"]["digest"] == vector.update
    assert (entries["intent"]["numbers"], entries["intent"]["reported"]) == ([], [])
    assert (entries["revealed"]["own_masks"], entries["revealed"]["mask_keys"]) == ([CLIENT, *OTHERS], [])
    [record] = (tmp_path / "secure").iterdir()
    assert '"seed":null' in record.read_text()
    assert record.stat().st_mode & 0o777 == 0o600


def _without(name: str, field: str) -> Lie:
    return lambda status: status.model_copy(
        update={field: {client: it for client, it in getattr(status, field).items() if client != name}}
    )


def _with_other_keys(status: SecureStatus) -> SecureStatus:
    assert status.roster is not None
    keys = status.roster["hospital-b"]
    swapped = keys.model_copy(update={"mask_key": status.roster["hospital-c"].mask_key})
    return status.model_copy(update={"roster": {**status.roster, "hospital-b": swapped}})


def _with_an_invented_client(status: SecureStatus) -> SecureStatus:
    assert status.roster is not None
    return status.model_copy(update={"roster": {**status.roster, "hospital-x": status.roster["hospital-b"]}})


def _with_fewer_sharers(status: SecureStatus) -> SecureStatus:
    assert status.inbox is not None
    inbox = status.inbox.model_copy(update={"sharers": status.inbox.sharers[:2]})
    return status.model_copy(update={"inbox": inbox})


def _with_another_signature(status: SecureStatus) -> SecureStatus:
    assert status.survivors is not None
    return status.model_copy(update={"survivors": {**status.survivors, "hospital-b": "00" * 64}})


def _with_one_confirmation(status: SecureStatus) -> SecureStatus:
    assert status.confirmations is not None
    return status.model_copy(update={"confirmations": {CLIENT: status.confirmations[CLIENT]}})


LIES: dict[str, tuple[str, Lie, str]] = {
    "swapped keys": ("shares", _with_other_keys, "hospital-b did not sign these keys"),
    "an invented client": ("shares", _with_an_invented_client, "hospital-x is not in the cohort"),
    "a roster without this worker": ("shares", _without(CLIENT, "roster"), "does not have the keys that this client"),
    "too few sharers": ("vectors", _with_fewer_sharers, "2 clients are fewer than the 3"),
    "survivors without this worker": ("confirmations", _without(CLIENT, "survivors"), "lacks this client"),
    "survivors of another list": ("confirmations", _with_another_signature, "did not sign the same list"),
    "too few confirmations": ("reveals", _with_one_confirmation, "1 client confirmed this list of survivors, and 3"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_recorded_and_nothing_more_is_sent(name: str, tmp_path: Path) -> None:
    phase, lie, words = LIES[name]
    cohort = Cohort(tmp_path)
    cohort.lies[phase] = lie
    with pytest.raises(NotPermitted, match=words):
        cohort.take_part()
    phases = ["keys", "shares", "vectors", "confirmations", "reveals"]
    assert cohort.kinds_sent() == phases[: phases.index(phase)]
    assert words in cohort.ledger()[-1]["reason"]
    assert cohort.ledger()[-1]["kind"] == "refused"
    with pytest.raises(NotPermitted, match="has taken part in round 3 already"):  # not after a restart either
        cohort.take_part()
    assert cohort.kinds_sent() == phases[: phases.index(phase)]


class _Killed(BaseException):
    pass


def _killed_at(cohort: Cohort, phase: str) -> None:
    """Take part until the coordinator reports the phase, then kill the worker."""

    def kill(status: SecureStatus) -> SecureStatus:
        raise _Killed

    cohort.lies[phase] = kill
    with pytest.raises(_Killed):
        cohort.take_part()
    del cohort.lies[phase]


def test_a_second_list_of_survivors_is_refused_after_a_restart(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    _killed_at(cohort, "reveals")
    cohort.lies["reveals"] = _without("hospital-d", "survivors")
    with pytest.raises(NotPermitted, match="another list of survivors was already confirmed"):
        cohort.take_part()
    assert cohort.kinds_sent() == ["keys", "shares", "vectors", "confirmations"]


def test_a_second_roster_is_refused_after_a_restart(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    _killed_at(cohort, "vectors")
    cohort.server.phase = "shares"  # the coordinator asks for shares twice
    cohort._shown = {"roster": {keys.client: wire.keys_to_wire(keys) for keys in cohort.roster[:3]}}
    with pytest.raises(NotPermitted, match="shares were already made for another roster"):
        cohort.take_part()
    assert cohort.kinds_sent() == ["keys", "shares"]


@pytest.mark.parametrize("phase", ["keys", "shares", "vectors", "confirmations", "reveals"])
def test_a_worker_killed_while_it_sends_a_message_sends_the_same_bytes_again(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The coordinator has not received the message, so it asks for it again.
    cohort = Cohort(tmp_path)

    def kill(assignment_id: UUID, message: Any) -> None:
        if message.phase != phase:
            Cohort.send_secure(cohort, assignment_id, message)
            return
        cohort.sent.append(message)
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(cohort, "send_secure", kill)
        with pytest.raises(_Killed):
            cohort.take_part()
    if phase == "reveals":
        cohort.sent.pop()  # `secure_status` reports the end of the round once a message of this phase was sent
    killed = [message for message in cohort.sent if message.phase == phase] or [None]
    cohort.take_part()
    again = [message for message in cohort.sent if message.phase == phase]
    assert len({message.model_dump_json() for message in again}) == 1
    assert killed in ([None], again[:1])
    assert cohort.kinds_sent()[-1] == "reveals"


def test_a_round_recorded_by_an_older_version_is_not_joined_and_the_next_one_is(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    rounds = cohort.worker()
    path = tmp_path / "secure" / f"{cohort.item.run_id}.json"
    old = {"round": 3, "context": "ab" * 32, "seed": "cd" * 32, "roster": {OTHERS[0]: {"mask_key": "00" * 32}}}
    path.write_text(json.dumps(old))
    with pytest.raises(NotPermitted, match="has taken part in round 3 already"):
        rounds.begin(cohort.item, cohort.context)
    assert cohort.sent == []
    item = cohort.item.model_copy(update={"round_number": 4})
    rounds.begin(item, cohort.context_of(4))
    stored = json.loads(path.read_text())
    assert (stored["protocol"], stored["round"]) == (SECURE_PROTOCOL, 4)
    assert stored["seed"] not in (None, "cd" * 32)


def test_no_second_vector_is_sent_if_training_again_gave_other_bits(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    _killed_at(cohort, "confirmations")
    other = cohort.words + np.uint64(1)
    with pytest.raises(NotPermitted, match="trained again with other bits"):
        cohort.take_part(words=other)
    assert cohort.kinds_sent() == ["keys", "shares", "vectors"]


def test_no_second_vector_is_sent_if_the_file_of_the_run_was_deleted(tmp_path: Path) -> None:
    """The difference of two sums of a round with other survivors could be one update. The ledger records the first."""
    cohort = Cohort(tmp_path)
    cohort.take_part()
    shutil.rmtree(tmp_path / "secure")
    again = Cohort(tmp_path, identities=cohort.identities)
    with pytest.raises(NotPermitted, match="another masked vector of round 3 has left before"):
        again.take_part()
    assert again.kinds_sent() == ["keys", "shares"]
    assert cohort.ledger()[-1]["kind"] == "refused"


def test_no_other_shares_are_revealed_in_a_round_after_the_first_ones(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.take_part()
    [*_, revealed] = cohort.sent
    cohort.worker()
    cohort.egress.send_secure(cohort.item, revealed)  # the same message again
    lost = {name: share for name, share in revealed.self_shares.items() if name == "hospital-d"}
    survived = {name: share for name, share in revealed.self_shares.items() if name not in lost}
    with pytest.raises(NotPermitted, match="other shares were revealed in round 3 before"):
        cohort.egress.send_secure(cohort.item, SecureReveals(self_shares=survived, mask_shares=lost))
    assert cohort.sent[-2:] == [revealed, revealed]


def test_the_limit_on_all_runs_counts_the_masked_vector(tmp_path: Path) -> None:
    """The vector is longer than the update, from which the first check estimates its size."""
    cohort = Cohort(tmp_path)
    cohort.policy = f"max_bytes_total = 100\n{POLICY}"
    with pytest.raises(NotPermitted, match=r"permits 100 bytes in all runs together \(max_bytes_total\)"):
        cohort.take_part()
    assert cohort.kinds_sent() == ["keys", "shares"]
    assert cohort.ledger()[-1]["kind"] == "refused"


def test_a_worker_whose_message_was_late_leaves_the_round(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.lies["vectors"] = lambda status: status.model_copy(update={"is_member": False})
    with pytest.raises(Cancelled, match="continues without this worker: its message came too late for vectors"):
        cohort.take_part()
    assert cohort.kinds_sent() == ["keys", "shares"]


def test_cancelled_work_leaves_the_round(tmp_path: Path) -> None:
    def cancel() -> None:
        raise Cancelled("the run was stopped")

    cohort = Cohort(tmp_path)
    part = cohort.worker().begin(cohort.item, cohort.context)
    with part.agreeing():
        time.sleep(0.05)  # it trains
    with pytest.raises(Cancelled, match="the run was stopped"):
        part.finish(cohort.finished, cohort.words, cancel)
    assert cohort.kinds_sent() == ["keys", "shares", "vectors"]


def test_a_worker_does_not_take_part_in_a_round_twice_or_with_another_broadcast(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    _killed_at(cohort, "shares")
    with pytest.raises(NotPermitted, match="another cohort, broadcast, plan or spec was shown"):
        cohort.worker().begin(cohort.item, cohort.context_of(3, broadcast="1" * 64))
    cohort.take_part()
    for number in (3, 2):
        item = cohort.item.model_copy(update={"round_number": number})
        with pytest.raises(NotPermitted, match=f"has taken part in round 3 already, and is asked for round {number}"):
            cohort.worker().begin(item, cohort.context_of(number))


@pytest.mark.parametrize("phase", ["keys", "vectors"])
@pytest.mark.parametrize(
    ("end", "said"),
    [("failed", "the secure round has no sum"), ("done", "the secure round has ended without this worker's update")],
)
def test_a_round_that_ended_before_this_workers_vector_is_not_an_accepted_update(
    end: SecurePhase, said: str, phase: str, tmp_path: Path
) -> None:
    cohort = Cohort(tmp_path)
    cohort.lies[phase] = lambda status: SecureStatus(phase=end, is_member=True, received=True)
    with pytest.raises(Cancelled, match=said):
        cohort.take_part()
    assert "vectors" not in cohort.kinds_sent()
    assert cohort.worker().unfinished() == []


def test_the_secrets_of_an_unfinished_round_are_deleted_after_the_run_has_ended(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    _killed_at(cohort, "reveals")
    secure, path = cohort.worker(), tmp_path / "secure" / f"{cohort.item.run_id}.json"
    assert secure.unfinished() == [cohort.item.run_id]
    StateCollector(cohort, ClientStates(tmp_path / "runs"), secure, 3600.0).collect()  # type: ignore[arg-type]
    assert secure.unfinished() == []
    kept = {name: value for name, value in json.loads(path.read_text()).items() if value is not None}
    assert sorted(kept) == ["context", "protocol", "round"]
    with pytest.raises(NotPermitted, match="has taken part in round 3 already"):
        secure.begin(cohort.item, cohort.context)


def test_the_owners_limits_are_checked_before_anything_leaves(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    pins = {
        name: f"ed25519:{key.public_key().public_bytes_raw().hex()}"
        for name, key in cohort.identities.items()
        if name in OTHERS
    }

    def pinned(keys: dict[str, str]) -> str:
        return "pins = {" + ", ".join(f'{name} = "{key}"' for name, key in keys.items()) + "}\n"

    for policy, words in (
        ("min_cohort = 5\n", "sums 3 updates or more, and the data owner demands 5"),
        ("collusion = 1\n", "resists 0 colluding clients, and the data owner demands 1"),
        (pinned({**pins, "hospital-c": pins["hospital-b"]}), "identity key of hospital-c is not the pinned one"),
        (pinned({name: pins[name] for name in OTHERS[:2]}), "identity key of hospital-d is not the pinned one"),
    ):
        with pytest.raises(NotPermitted, match=words):
            cohort.worker(policy).begin(cohort.item, cohort.context)
    assert cohort.sent == []
    assert [body["kind"] for body in cohort.ledger()].count("refused") == 4
    cohort.take_part(pinned(pins))
    assert cohort.kinds_sent()[-1] == "reveals"
