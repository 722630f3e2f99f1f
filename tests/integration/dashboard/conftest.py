"""Fixtures with one coordinator for all tests of the web page, and a viewer, an operator and an admin signed in to
it."""

from collections.abc import Iterator

import pytest

from support.coordinator import Coordinator
from support.pages import Browser
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables


@pytest.fixture(scope="session")
def standing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Yield a coordinator that all tests share, so each sees what the others have added."""
    store = tmp_path_factory.mktemp("pages") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as running:
        yield running


@pytest.fixture(scope="session")
def tables(standing: Coordinator) -> Iterator[Tables]:
    with Tables(standing.database_url) as looking:
        yield looking


@pytest.fixture(scope="session")
def viewer(standing: Coordinator) -> Iterator[Browser]:
    with Browser(standing, standing.client.create_token("viewer", label="Vera").secret) as browser:
        yield browser


@pytest.fixture(scope="session")
def operator(standing: Coordinator) -> Iterator[Browser]:
    with Browser(standing, standing.operator_token) as browser:
        yield browser


@pytest.fixture(scope="session")
def admin(standing: Coordinator) -> Iterator[Browser]:
    with Browser(standing, standing.admin_token) as browser:
        yield browser


@pytest.fixture(scope="session")
def scenario(standing: Coordinator, tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Return a run of three rounds in which two clients delivered the first, which is closed, and claimed the
    second."""
    scenario = Scenario(standing, tables, tmp_path_factory.mktemp("scenario"), "ab", name="small", num_rounds=3)
    scenario.work("a", "b")
    scenario.advance()
    scenario.claim("a")
    scenario.claim("b")
    return scenario
