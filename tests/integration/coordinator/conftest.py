"""One coordinator a module: started once, and emptied for every test that asks for a fresh one."""

from collections.abc import Iterator

import pytest
import structlog

from support import traces
from support.coordinator import Coordinator
from support.servers import Servers
from support.tables import Onlooker, Tables

_RUNS_ARE_DRIVEN = ("aggregator", "federation")


@pytest.fixture(scope="session", autouse=True)
def plain_logging() -> None:
    """Tracebacks as they are in production: the pretty ones that structlog makes by itself take a second each."""
    processors = [structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    structlog.configure(processors=processors)


@pytest.fixture(scope="module")
def standing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator for all tests of a module, for requests that are refused and so change nothing."""
    store = tmp_path_factory.mktemp("standing") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as running:
        yield running


@pytest.fixture(scope="module")
def onlooker(standing: Coordinator) -> Iterator[Onlooker]:
    """Sees whether a request to the coordinator left a trace."""
    with Tables(standing.database_url) as looking:
        yield Onlooker(looking, standing.store)


@pytest.fixture
def tables(onlooker: Onlooker) -> Tables:
    """A look at the database."""
    return onlooker.tables


@pytest.fixture
def coordinator(standing: Coordinator, onlooker: Onlooker, request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    """The module's coordinator with nothing in it but the tokens that it began with.

    Where runs are driven, the events of every run must be a path of the state machines that leads to the rows.
    """
    tables = onlooker.tables
    standing.empty(tables)
    yield standing
    if request.path.parent.name in _RUNS_ARE_DRIVEN and request.node.get_closest_marker("changes_states") is None:
        try:
            traces.check_all(tables)
        except traces.NotAPath as error:
            pytest.fail(f"{error}\nIf the test itself writes states into the tables, mark it changes_states.")
