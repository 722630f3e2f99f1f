"""A run and its clients, controlled by the test: claims, deliveries, expiring leases, and the passing of time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedssl.client import WorkerClient
from fedssl.protocol.views import EventView, RoundView, RunView
from fedssl.protocol.work import WorkItem
from support.coordinator import Coordinator
from support.federation import deliver, tiny_spec, upload_and_submit
from support.tables import Tables

# A scenario may exist while tests of other files run, so its leases must not expire by the clock.
_STILL = {"lease_seconds": 86_400, "deadline_seconds": 86_400}


class Scenario:
    """Registered workers and a run of theirs that is open. Time passes only through `lapse` and `pass_deadline`."""

    def __init__(
        self, coordinator: Coordinator, tables: Tables, folder: Path, names: str = "ab", **changes: Any
    ) -> None:
        self.coordinator = coordinator
        self.tables = tables
        self._folder = folder
        self._items: dict[str, WorkItem] = {}
        self.workers: dict[str, WorkerClient] = {name: coordinator.worker(name) for name in names}
        cohort = {"clients": list(names), "min_clients": len(names), **_STILL, **changes.pop("cohort", {})}
        self.id = coordinator.client.create_run(tiny_spec(cohort=cohort, **changes)).id
        self.advance()

    def advance(self) -> None:
        self.coordinator.advance(self.id)

    @property
    def run(self) -> RunView:
        return self.coordinator.client.run(self.id)

    @property
    def rounds(self) -> list[RoundView]:
        return list(self.coordinator.client.rounds(self.id))

    @property
    def round(self) -> RoundView:
        """The newest round."""
        return self.rounds[-1]

    def claim(self, name: str) -> WorkItem:
        item = self.workers[name].claim(0)
        assert item is not None, f"nothing to do for {name}"
        self._items[name] = item
        return item

    def item(self, name: str) -> WorkItem:
        """Return the assignment that the client claimed last."""
        return self._items[name]

    def deliver(self, name: str, value: float = 1.0, num_examples: int = 10) -> None:
        deliver(self.workers[name], self._items[name], self._folder, value, num_examples)

    def upload(self, name: str, value: float = 1.0) -> None:
        """Upload and submit, as a large update."""
        upload_and_submit(self.workers[name], self._items[name], self._folder, value)

    def work(self, *names: str, value: float = 1.0) -> None:
        """Claim and deliver work for each client."""
        for name in names:
            self.claim(name)
            self.deliver(name, value)

    def expire_lease(self, name: str) -> None:
        """Let the client's lease run out."""
        self.tables.execute(
            "UPDATE assignments SET lease_expires_at = now() - interval '1 second' "
            "WHERE run_id = %s AND client_id = %s AND state = 'leased'",
            self.id,
            name,
        )

    def pass_deadline(self) -> None:
        """Let the deadline of the unclosed round pass."""
        self.tables.execute(
            "UPDATE rounds SET deadline = now() - interval '1 second' WHERE run_id = %s AND state <> 'closed'", self.id
        )

    def states(self) -> list[tuple[str, int, str]]:
        """Return the client, attempt and state of every assignment of the newest round."""
        return [(a.client_id, a.attempt, a.state.value) for a in self.round.assignments]

    def events(self, kind: str) -> list[EventView]:
        return [event for event in self.coordinator.client.event_log(self.id) if event.kind == kind]

    def is_complete(self) -> bool:
        """Return whether the newest round waits for no further update: the last one enqueues the aggregator."""
        from fedssl_coordinator.core.db import transaction
        from fedssl_coordinator.federation.rounds import repository

        with transaction() as session:
            current = repository.latest(session, self.id)
            assert current is not None
            return repository.has_all_or_enough(session, current.id)

    def needs_attention(self) -> bool:
        """Return whether the sweep would examine the run."""
        from fedssl_coordinator.core.db import transaction
        from fedssl_coordinator.federation.rounds import repository

        with transaction() as session:
            return self.id in repository.needing_attention(session)


MakeScenario = Callable[..., Scenario]
