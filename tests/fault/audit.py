"""Assertions that must hold after every run, whatever faults occurred."""

import collections
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import LiteralString
from uuid import UUID

import torch

from fault import specs
from fault.federation import FaultFederation
from fault.injected import SAME_BITS
from fedssl.artifacts.tensors import load_tensors
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome
from fedssl.protocol.views import EventView, RunView
from fedssl_worker.disclosure.ledger.verification import verify
from support import traces
from support.methods import WITHOUT_LOSS
from support.tables import Tables

_SUSPICIOUS = ("ledger.went_back", "ledger.forked", "ledger.replaced", "assignment.foreign", "distillation.failed")

_NEEDED: LiteralString = """
    SELECT initial_broadcast FROM runs UNION SELECT server_state FROM runs UNION SELECT broadcast FROM runs
    UNION SELECT broadcast FROM rounds UNION SELECT unnest(ARRAY[initial_model, model, frozen]) FROM runs
    UNION SELECT model FROM rounds UNION SELECT checkpoint FROM distillation_jobs
    UNION SELECT digest FROM public_datasets UNION SELECT digest FROM evaluation_datasets
"""
"""The digests that a federation with only finished runs needs. Updates of closed rounds are not among them, nor uploads
of assignments that have ended."""

_AGEING: tuple[LiteralString, ...] = (
    "UPDATE artifacts SET touched_at = touched_at - interval '2 days'",
    "UPDATE partial_uploads SET created_at = created_at - interval '2 days'",
    # This happens only once per round, because its weights count as old after a month. If the database's clock was
    # ahead, the time may be in the future.
    "UPDATE rounds SET closed_at = closed_at - interval '2 days' WHERE closed_at > now() - interval '1 day'",
)
_TWO_DAYS = 2 * 24 * 3600.0
_TRIES = 10


def completed(federation: FaultFederation, run_id: UUID, spec: RunSpec, times_finished: int = 1) -> RunView:
    """Wait for the run's end and check everything: weights, rows, events, store and ledgers.

    `times_finished`: how often the run came to its end, if it was continued.
    """
    run = federation.finished(run_id)
    assert run.outcome == Outcome.COMPLETED, run.reason
    assert run.rounds_closed == spec.num_rounds
    same_weights(federation, run_id, spec)
    with federation.tables() as tables:
        nothing_lost_or_twice(tables, run_id, spec)
        traces.check(tables, run_id)
    story(list(federation.client.event_log(run_id)), spec, times_finished)
    no_orphans(federation)
    ledgers_hold(federation)
    federation.injected.settle(SAME_BITS)
    return run


def same_weights(federation: FaultFederation, run_id: UUID, spec: RunSpec) -> None:
    """Assert that the run's weights are exactly those of the undisturbed run."""
    path = federation.folder / "model.safetensors"
    federation.client.download_model(run_id, path)
    deployed, expected = load_tensors(path), specs.reference(spec)
    assert deployed.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(deployed[name], expected[name])]
    assert not different, f"other weights than the undisturbed run's: {different}"


def nothing_lost_or_twice(tables: Tables, run_id: UUID, spec: RunSpec) -> None:
    """Assert that every round closed with one update of each client, and that no client uploaded different bits for
    it."""
    rounds = tables.query("SELECT number, state, verdict FROM rounds WHERE run_id = %s ORDER BY number", run_id)
    assert rounds == [(number, "closed", "aggregated") for number in range(1, spec.num_rounds + 1)]
    accepted = tables.query(
        "SELECT round_number, client_id, num_examples FROM assignments WHERE run_id = %s AND state = 'accepted' "
        "ORDER BY 1, 2",
        run_id,
    )
    sizes = {name: len(images) for name, images in specs.images().items()}
    everybody = [(number, name, sizes[name]) for number in range(1, spec.num_rounds + 1) for name in specs.CLIENTS]
    assert accepted == everybody
    live = "SELECT state FROM assignments WHERE run_id = %s AND state IN ('offered', 'leased', 'submitted')"
    assert tables.query(live, run_id) == []
    uploads = tables.query(
        "SELECT a.round_number, a.client_id, count(DISTINCT u.digest) FROM uploads u JOIN assignments a "
        "ON a.id = u.assignment_id WHERE a.run_id = %s GROUP BY 1, 2",
        run_id,
    )
    assert {count for *_, count in uploads} == {1}, f"a client sent different bits for one round: {uploads}"
    jobs = tables.query(
        "SELECT round_number, state FROM distillation_jobs WHERE run_id = %s ORDER BY created_at", run_id
    )
    due = [number for number in range(spec.num_rounds + 1) if spec.method.distillation_epochs(number)]
    assert [job for job in jobs if job[1] != "cancelled"] == [(number, "completed") for number in due]
    reopened = tables.query(
        "SELECT round_number, 'cancelled' FROM events WHERE run_id = %s AND kind = 'round.reopened' ORDER BY id", run_id
    )
    assert [job for job in jobs if job[1] == "cancelled"] == [event for event in reopened if event[0] in due]
    losses = tables.query(
        "SELECT round_number, client_id FROM metrics WHERE run_id = %s AND name = 'loss' AND client_id IS NOT NULL "
        "ORDER BY 1, 2",
        run_id,
    )
    has_loss = spec.method.name not in WITHOUT_LOSS
    assert losses == [(number, name) for number, name, _ in everybody if has_loss]


def story(events: list[EventView], spec: RunSpec, times_finished: int = 1) -> None:
    """Assert that the log has the events of the run's life in order, each once."""
    assert [event for event in events if event.kind in _SUSPICIOUS] == []
    kinds = [event.kind for event in events]
    for kind, times in (("run.created", 1), ("run.prepared", 1), ("run.finished", times_finished)):
        assert kinds.count(kind) == times, f"{kind}: {kinds}"
    may_come_later = ("artifact.", "assignment.refused", "site_evaluation")
    lives = [event for event in events if not event.kind.startswith(may_come_later)]
    assert lives[-1].kind == "run.finished"
    for number in range(1, spec.num_rounds + 1):
        _story_of_a_round([event for event in events if event.round_number == number])


def _story_of_a_round(events: list[EventView]) -> None:
    at = collections.defaultdict(list)
    for event in events:
        at[event.kind].append(event.id)
    # Each time the store has lost updates, their clients are asked again.
    asked_again = [event.data["clients"] for event in events if event.kind == "round.reopened"]
    for kind, number in (("round.opened", 1), ("round.aggregating", 1 + len(asked_again)), ("round.closed", 1)):
        assert len(at[kind]) == number, f"{kind}: {[event.message for event in events]}"
    ends = [*at["round.reopened"], at["round.closed"][0]]
    for began, ended in zip([at["round.opened"][0], *ends], ends, strict=False):
        life = {kind: [each for each in ids if began <= each <= ended] for kind, ids in at.items()}
        order = [began, *life.get("assignment.accepted", []), *life["round.aggregating"], ended]
        assert order == sorted(order)
        assert len(life["round.aggregating"]) == 1
    num_updates = len(specs.CLIENTS) + sum(map(len, asked_again))
    assert len(at["assignment.submitted"]) == len(at["assignment.accepted"]) == num_updates
    for client in specs.CLIENTS:
        own = [event.kind for event in events if event.client_id == client]
        ended = own.count("assignment.accepted") + sum(
            event.kind in ("assignment.expired", "assignment.declined") and event.client_id == client
            for event in events
        )
        assert own.count("assignment.leased") <= ended, f"{client}: {own}"


def no_orphans(federation: FaultFederation) -> None:
    """Assert that the coordinator's own collector leaves exactly what some row needs, once everything is old enough.

    Retries for a few seconds, because the remains of an interrupted request may not have been removed yet.
    """
    left: list[str] = []
    for _ in range(_TRIES):
        _make_old(federation)
        with suppress(subprocess.CalledProcessError):  # another collection is running
            federation.command("collect")
        with federation.tables() as tables:
            left = _left_over(tables, federation.store)
        if not left:
            break
        time.sleep(1.0)
    assert not left, f"after a collection: {left}"
    federation.command("verify-store")  # exits with 1 if a needed file is missing or has other bytes


def _make_old(federation: FaultFederation) -> None:
    """Make everything in the store two days older. The store keeps unneeded files for one day."""
    with federation.tables() as tables:
        for statement in _AGEING:
            tables.execute(statement)
    for path in federation.store.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                os.utime(path, (path.stat().st_atime, time.time() - _TWO_DAYS))


def _left_over(tables: Tables, store: Path) -> list[str]:
    """Return the inconsistencies of store and tables: files without a row, unneeded rows, unfinished and missing
    files."""
    files = {path.name for path in store.glob("??/??/*")}
    rows = {digest for (digest,) in tables.query("SELECT digest FROM artifacts WHERE collected_at IS NULL")}
    needed = {digest for (digest,) in tables.query(_NEEDED) if digest is not None}
    begun = [path for folder in ("incoming", "partial", "damaged") for path in (store / folder).glob("*")]
    return [
        *(f"{path.relative_to(store)}: begun and never finished, or set aside" for path in begun),
        *(f"{digest}: a file that no row knows of" for digest in files - rows),
        *(f"{digest}: nothing refers to it" for digest in rows - needed),
        *(f"{digest}: referred to, and gone" for digest in needed - (files & rows)),
    ]


def ledgers_hold(federation: FaultFederation) -> None:
    """Assert that each worker's ledger is an unbroken chain, in which every kill has left at most one torn line."""
    for client in federation.clients:
        verify(federation.state(client) / "ledger")
