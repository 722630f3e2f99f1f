"""Measurements of a federation: each process's memory and time, and Postgres's connections, transactions and bytes."""

import os
import threading
from pathlib import Path
from typing import Any, Self

from support.tables import Tables

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int, *, with_children: bool = False) -> float:
    """Return the processor time that a running process has used, in seconds.

    `with_children`: adds that of its children, including those that have ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15] if with_children else fields[11:13])) / _TICKS
    return own + (sum(cpu_seconds(child) for child in children(pid)) if with_children else 0.0)


def peak_megabytes(pid: int) -> float:
    """Return the peak memory of a running process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def table_bytes(tables: Tables) -> dict[str, int]:
    """Return the bytes of every table, including its indexes."""
    rows = tables.query(
        "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables WHERE schemaname = 'public'"
    )
    return {str(name): int(size) for name, size in rows}


def num_transactions(tables: Tables) -> int:
    """Return how many transactions were committed so far. A process reports its own a second late."""
    found = tables.one("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
    assert isinstance(found, int)
    return found


class Connections:
    """Counts the database's connections ten times a second for the length of a block."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self.most = 0
        self.most_busy = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> tuple[int, int]:
        """Return the number of other connections, and how many of them are in a transaction."""
        [row] = self._tables.query(
            "SELECT count(*), count(*) FILTER (WHERE state <> 'idle') FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return int(row[0]), int(row[1])

    def _count(self) -> None:
        while not self._stop.wait(0.1):
            num, busy = self.now()
            self.most, self.most_busy = max(self.most, num), max(self.most_busy, busy)


def rounds_of(tables: Tables, run: object) -> list[dict[str, Any]]:
    """Return how many seconds each part of each closed round took, by the database's clock."""
    rows = tables.query(
        """
        SELECT r.number, count(a.*), extract(epoch FROM max(a.leased_at) - r.opened_at),
          extract(epoch FROM max(a.closed_at) FILTER (WHERE a.state = 'accepted') - r.opened_at),
          extract(epoch FROM min(e.at) - max(a.closed_at) FILTER (WHERE a.state = 'accepted')),
          extract(epoch FROM r.closed_at - min(e.at)),
          extract(epoch FROM lead(r.opened_at) OVER (ORDER BY r.number) - r.closed_at),
          extract(epoch FROM percentile_cont(0.5) WITHIN GROUP (ORDER BY a.leased_at - r.opened_at))
        FROM rounds r JOIN assignments a ON a.round_id = r.id
        JOIN events e ON e.run_id = r.run_id AND e.round_number = r.number AND e.kind = 'round.aggregating'
        WHERE r.run_id = %s AND r.state = 'closed' GROUP BY r.id ORDER BY r.number
        """,
        run,
    )
    names = ("round", "clients", "all_claimed", "all_submitted", "noticed", "aggregated", "next_opened", "median_claim")
    return [
        {name: value if value is None or isinstance(value, int) else round(float(value), 3)
         for name, value in zip(names, row, strict=True)}
        for row in rows
    ]  # fmt: skip
