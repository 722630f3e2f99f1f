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
def shared_coordinator(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Yield a coordinator that all tests share, so each sees what the others have added."""
    store = tmp_path_factory.mktemp("pages") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as running:
        yield running


@pytest.fixture(scope="session")
def tables(shared_coordinator: Coordinator) -> Iterator[Tables]:
    with Tables(shared_coordinator.database_url) as looking:
        yield looking


@pytest.fixture(scope="session")
def viewer(shared_coordinator: Coordinator) -> Iterator[Browser]:
    with Browser(shared_coordinator, shared_coordinator.client.create_token("viewer", label="Vera").secret) as browser:
        yield browser


@pytest.fixture(scope="session")
def operator(shared_coordinator: Coordinator) -> Iterator[Browser]:
    with Browser(shared_coordinator, shared_coordinator.operator_token) as browser:
        yield browser


@pytest.fixture(scope="session")
def admin(shared_coordinator: Coordinator) -> Iterator[Browser]:
    with Browser(shared_coordinator, shared_coordinator.admin_token) as browser:
        yield browser


@pytest.fixture(scope="session")
def scenario(shared_coordinator: Coordinator, tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Return a run of three rounds in which two clients delivered the first, which is closed, and claimed the
    second."""
    scenario = Scenario(
        shared_coordinator, tables, tmp_path_factory.mktemp("scenario"), "ab", name="small", num_rounds=3
    )
    scenario.work("a", "b")
    scenario.advance()
    scenario.claim("a")
    scenario.claim("b")
    return scenario
