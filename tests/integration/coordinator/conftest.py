"""One coordinator per module: started once, and emptied for every test that uses the fixture `coordinator`."""

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
    """Format tracebacks as in production: each of structlog's pretty ones, its default, takes a second."""
    processors = [structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    structlog.configure(processors=processors)


@pytest.fixture(scope="module")
def standing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Yield one coordinator for all tests of a module, for requests that are refused and therefore change nothing."""
    store = tmp_path_factory.mktemp("standing") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as running:
        yield running


@pytest.fixture(scope="module")
def onlooker(standing: Coordinator) -> Iterator[Onlooker]:
    """Yield an onlooker, which checks whether a request to the coordinator changed anything."""
    with Tables(standing.database_url) as looking:
        yield Onlooker(looking, standing.store)


@pytest.fixture
def tables(onlooker: Onlooker) -> Tables:
    """Return access to the tables of the module's coordinator."""
    return onlooker.tables


@pytest.fixture
def coordinator(standing: Coordinator, onlooker: Onlooker, request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    """Yield the module's coordinator, which holds only the tokens that it began with.

    In folders whose tests drive runs, fails the test unless the events of every run are a path of the state machines
    that leads to the rows.
    """
    tables = onlooker.tables
    standing.empty(tables)
    yield standing
    if request.path.parent.name in _RUNS_ARE_DRIVEN and request.node.get_closest_marker("changes_states") is None:
        try:
            traces.check_all(tables)
        except traces.NotAPath as error:
            pytest.fail(f"{error}\nIf the test itself writes states into the tables, mark it changes_states.")
