"""A coordinator that a whole module shares, for tests whose requests are refused and so change nothing."""

from collections.abc import Iterator

import pytest
import structlog
from support.coordinator import Coordinator
from support.servers import Servers
from support.tables import Onlooker, Tables


@pytest.fixture(scope="session", autouse=True)
def plain_logging() -> None:
    """Tracebacks as they are in production: the pretty ones that structlog makes by itself take a second each."""
    processors = [structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    structlog.configure(processors=processors)


@pytest.fixture
def tables(coordinator: Coordinator) -> Iterator[Tables]:
    """A look at the test's own database."""
    with Tables(coordinator.database_url) as looking:
        yield looking


@pytest.fixture(scope="module")
def standing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator for all tests of a module. It never holds a claim open."""
    store = tmp_path_factory.mktemp("standing") / "store"
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, store, FEDSSL_CLAIM_WAIT_SECONDS="0") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def onlooker(standing: Coordinator) -> Iterator[Onlooker]:
    """Sees whether a request to `standing` left a trace."""
    with Tables(standing.database_url) as looking:
        yield Onlooker(looking, standing.store)
