"""Bit rot and lost files in the coordinator's store, before the files are read."""

import functools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.points import Round, aggregator_waits, until_open

FAULT_CLASS = "bit rot and lost files"

METHODS = ("scaffold", "flesd")


def _flip(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _cut(content: bytearray, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


def _zero(content: bytearray, rng: random.Random) -> None:
    """Set 512 bytes to zero, at least one of which was not zero before."""
    start = rng.randrange(len(content) // 2)
    content[start] |= 1
    content[start : start + 512] = bytes(len(content[start : start + 512]))


DAMAGES: dict[str, Callable[[bytearray, random.Random], None] | None] = {
    "flipped bit": _flip,
    "truncated file": _cut,
    "zeroed block": _zero,
    "lost file": None,
}


class Backup:
    """The content of damaged files before the damage."""

    def __init__(self, federation: FaultFederation, rng: random.Random) -> None:
        self._federation = federation
        self._rng = rng
        self._contents: dict[Path, bytes] = {}

    def damage(self, digest: str, what: str, point: str) -> str:
        """Damage a file in a random way, and return the name of the way."""
        path = self._federation.store / digest[:2] / digest[2:4] / digest
        kind = self._rng.choice(sorted(DAMAGES))
        self._federation.injected.note(kind, what, point)
        self._contents[path] = path.read_bytes()
        if (change := DAMAGES[kind]) is None:
            path.unlink()
            return kind
        content = bytearray(self._contents[path])
        change(content, self._rng)
        about = path.stat()
        path.write_bytes(content)
        os.utime(path, (about.st_atime, about.st_mtime - 60))  # stored a minute ago, and damaged without a write
        return kind

    def restore(self) -> None:
        """Restore all damaged files as an operator does: write each next to its place, and then rename it."""
        for path, content in self._contents.items():
            restored = path.with_suffix(".restored")
            restored.write_bytes(content)
            restored.replace(path)
        self._contents.clear()


@pytest.fixture
def backup(federation: FaultFederation, rng: random.Random) -> Backup:
    return Backup(federation, rng)


@pytest.mark.parametrize("method", METHODS)
def test_clients_send_damaged_updates_again(
    method: str, federation: FaultFederation, backup: Backup, rng: random.Random
) -> None:
    """The damaged updates are not restored."""
    spec = specs.spec(method, num_rounds=2)
    run_id = federation.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        at = Round(run_id, number)
        until_open(federation, at)
        with aggregator_waits(federation, at):
            updates = federation.query(
                "SELECT DISTINCT update_digest FROM assignments WHERE run_id = %s AND round_number = %s "
                "AND state = 'accepted' ORDER BY 1",
                run_id,
                number,
            )
            for (digest,) in rng.sample(updates, k=rng.randint(1, len(updates))):
                backup.damage(digest, "update", "before an aggregation")
    audit.completed(federation, run_id, spec)
    reopened = [event for event in federation.client.event_log(run_id) if event.kind == "round.reopened"]
    assert len(reopened) == spec.num_rounds


@pytest.mark.parametrize("method", METHODS)
def test_a_run_waits_until_a_damaged_server_state_is_restored(
    method: str, federation: FaultFederation, backup: Backup
) -> None:
    """Meanwhile an event names the server state."""
    spec = specs.spec(method, num_rounds=2)
    run_id = federation.begin(spec)
    at = Round(run_id, 2)
    until_open(federation, at)
    with aggregator_waits(federation, at):
        [(digest,)] = federation.query("SELECT server_state FROM runs WHERE id = %s", run_id)
        backup.damage(digest, "server state", "before an aggregation")
    federation.until(functools.partial(_is_named, federation, run_id, digest), "the event that names the server state")
    assert [run.rounds_closed for run in [federation.client.run(run_id)]] == [1]
    backup.restore()
    audit.completed(federation, run_id, spec)


def test_clients_do_not_train_on_a_damaged_broadcast(federation: FaultFederation, backup: Backup) -> None:
    """When the broadcast is restored, the clients continue."""
    spec = specs.spec("scaffold", num_rounds=2)
    run_id = federation.begin(spec)
    until_open(federation, Round(run_id, 1))
    with aggregator_waits(federation, Round(run_id, 1)):
        workers = [federation.stopped(name, "before the next round") for name in specs.CLIENTS]
        for worker in workers:
            worker.__enter__()
    until_open(federation, Round(run_id, 2))
    [(digest,)] = federation.query("SELECT broadcast FROM rounds WHERE run_id = %s AND number = 2", run_id)
    backup.damage(digest, "broadcast", "before it is fetched")
    for worker in workers:
        worker.__exit__(None, None, None)
    time.sleep(2.0)
    backup.restore()
    for name in specs.CLIENTS:  # what a client has declined is offered again when its worker restarts
        federation.crash_and_revive(name, "after a lost broadcast")
    audit.completed(federation, run_id, spec)


def test_a_distillation_with_a_damaged_checkpoint_starts_from_scratch(
    federation: FaultFederation, backup: Backup
) -> None:
    """The checkpoint is not needed: the result has the same bits."""
    spec = specs.spec("flesd", num_rounds=1)
    run_id = federation.begin(spec)
    found = "SELECT checkpoint FROM distillation_jobs WHERE run_id = %s AND checkpoint IS NOT NULL"
    federation.until(lambda: federation.query(found, run_id), "a checkpoint", 90)
    with federation.stopped("distiller", "mid-distillation"):
        [(digest,)] = federation.query(found, run_id) or [(None,)]
        if digest is not None:
            backup.damage(digest, "checkpoint", "mid-distillation")
        federation.crash("distiller", "after its checkpoint was damaged")
    federation.revive("distiller")
    audit.completed(federation, run_id, spec)


def _is_named(federation: FaultFederation, run_id: UUID, digest: str) -> bool:
    stalled = [event for event in federation.client.event_log(run_id) if event.kind.endswith(".stalled")]
    return any(digest in event.message for event in stalled)
