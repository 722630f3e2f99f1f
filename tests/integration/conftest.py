"""One coordinator per module: started once, and emptied for every test that uses the fixture `coordinator`."""

from collections.abc import Iterator

import pytest

from support.coordinator import Coordinator
from support.servers import Servers
from support.tables import Tables


@pytest.fixture(scope="module")
def shared_coordinator(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Yield one coordinator for all tests of a module, for requests that are refused and therefore change nothing."""
    store = tmp_path_factory.mktemp("standing") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as running:
        yield running


@pytest.fixture(scope="module")
def tables(shared_coordinator: Coordinator) -> Iterator[Tables]:
    """Yield access to the tables of the module's coordinator."""
    with Tables(shared_coordinator.database_url) as looking:
        yield looking


@pytest.fixture
def coordinator(shared_coordinator: Coordinator, tables: Tables) -> Coordinator:
    """Return the module's coordinator, which holds only the tokens that it began with."""
    shared_coordinator.empty(tables)
    return shared_coordinator
