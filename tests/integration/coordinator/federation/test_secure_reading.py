"""Bytes that aggregator and API read in a secure round: no shares, which grow with the square of the cohort."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb
from sqlalchemy import event

from fedssl_coordinator.core.db import engine
from fedssl_coordinator.federation.secure_rounds.repository import Present
from fedssl_coordinator.federation.secure_rounds.service import _may_suffice
from support.coordinator import Coordinator
from support.methods import method_spec
from support.secure_members import SecureMembers
from support.secure_rounds import SecureRound
from support.tables import Tables

PAD = 500_000
LARGEST = 250_000
"""Bytes that all statements of a step may return. The rest of a round of four clients is much smaller."""


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes of all values that the database returns within the block."""
    counts: list[int] = []

    def count(_connection: Any, cursor: Any, *_: Any) -> None:
        result = cursor.pgresult
        values = (result.get_value(row, field) for row in range(result.ntuples) for field in range(result.nfields))
        counts.append(sum(len(value) for value in values if value is not None))

    event.listen(engine(), "after_cursor_execute", count)
    try:
        yield counts
    finally:
        event.remove(engine(), "after_cursor_execute", count)


def test_no_step_reads_the_shares_of_all_clients(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    spec = method_spec(
        "fedbyol",
        num_rounds=1,
        aggregation={"arithmetic": "fixed"},
        partition={"dataset": "digits", "num_clients": 4, "alpha": 1.0, "max_images": 160},
        cohort={"min_clients": 4, "lease_seconds": 60},
        secure_aggregation={"min_cohort": 3, "collusion": 0, "phase_seconds": 60},
    )
    members = SecureMembers(coordinator, tmp_path, spec)
    names = sorted(members.items)
    for name in names:
        members.send(name, members.keys(name))
    members.advance()
    shares = {name: members.share(name) for name in names}
    for name in names[:3]:
        members.send(name, shares[name])
    # A client's own row is read when it sends something.
    pad = "UPDATE secure_members SET {0} = jsonb_set({0}, '{{{1},pad}}', %s) WHERE {0} IS NOT NULL AND client_id <> %s"
    tables.execute(pad.format("shares", "boxes"), Jsonb("0" * PAD), names[2])
    with counted_bytes() as while_waiting:
        members.advance()
    with counted_bytes() as of_last_shares:
        members.send(names[3], shares[names[3]])
    with counted_bytes() as at_the_end:
        members.advance()
    assert members.shown().phase == "vectors"
    words = members.words(names[0])
    for name in names:
        members.send(name, members.masked(name, words))
    members.advance()
    for name in names:
        members.confirm(name)
    members.advance()
    answers = {name: members.reveals(name) for name in names}
    for name in names[:2]:
        members.send(name, answers[name])
    tables.execute(pad.format("reveals", "self_shares"), Jsonb("0" * PAD), names[2])
    with counted_bytes() as while_revealing:
        members.advance()
    with counted_bytes() as of_reveals:
        members.send(names[2], answers[names[2]])
    for step in (while_waiting, of_last_shares, at_the_end, while_revealing, of_reveals):
        assert 0 < sum(step) < LARGEST
    assert members.shown().phase == "reveals"


def _arrived(num_revealed: int) -> list[Present]:
    return [Present(f"c{n:03d}", True, True, True, True, True if n < num_revealed else None) for n in range(200)]


def test_a_sparse_round_is_checked_whenever_half_of_the_missing_clients_have_revealed() -> None:
    context = SecureRound(200).context
    limits = context.thresholds
    assert limits.degree < 199
    checks = [n for n in range(200) if _may_suffice(context, _arrived(n), 200 - n)]
    assert checks == [200 - missing for missing in (32, 16, 8, 4, 2, 1)]
    assert min(checks) * (limits.degree + 1) >= limits.threshold * 200 > 136 * (limits.degree + 1)


def test_a_complete_graph_is_checked_once_the_threshold_is_reached() -> None:
    context = SecureRound(10).context
    arrived = _arrived(0)[:10]
    checks = [n for n in range(10) if _may_suffice(context, arrived, 10 - n)]
    assert checks == [7, 8, 9]
    assert context.thresholds.threshold == 7
