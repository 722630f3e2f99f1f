"""The module's coordinator, with checks that its runs follow the state machines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from support import traces
from support.coordinator import Coordinator
from support.scenario import MakeScenario, Scenario
from support.servers import Servers
from support.tables import ChangeWatcher, Tables

_RUNS_ARE_DRIVEN = ("aggregator", "federation")


@pytest.fixture(scope="session", autouse=True)
def plain_logging() -> None:
    """Format tracebacks as in production: each of structlog's pretty ones, its default, takes a second."""
    processors = [structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    structlog.configure(processors=processors)


@pytest.fixture(scope="module")
def database(servers: Servers) -> Iterator[str]:
    """Yield the address of a migrated database for all tests of a module."""
    with servers.database() as url:
        yield url


@pytest.fixture(scope="module")
def change_watcher(shared_coordinator: Coordinator, tables: Tables) -> ChangeWatcher:
    """Return a watcher that checks whether a request to the coordinator changed anything."""
    return ChangeWatcher(tables, shared_coordinator.store)


@pytest.fixture
def coordinator(coordinator: Coordinator, tables: Tables, request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    """Yield the module's coordinator, which holds only the tokens that it began with.

    In folders whose tests drive runs, fails the test unless the events of every run are a path of the state machines
    that leads to the rows.
    """
    yield coordinator
    if request.path.parent.name in _RUNS_ARE_DRIVEN and request.node.get_closest_marker("changes_states") is None:
        try:
            traces.check_all(tables)
        except traces.ImpossibleTrace as error:
            pytest.fail(f"{error}\nIf the test itself writes states into the tables, mark it changes_states.")


@pytest.fixture
def make_scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> MakeScenario:
    """Return a function that starts a run with clients whose names are letters."""

    def make(names: str = "ab", **changes: object) -> Scenario:
        return Scenario(coordinator, tables, tmp_path, names, **changes)

    return make
