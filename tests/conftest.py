"""Servers and coordinators for every test that asks for them: real Postgres, a real Redis-protocol server."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.coordinator import Coordinator, forget, is_of_this_environment
from support.object_store import ObjectStore
from support.servers import Servers

# Background jobs of a shell ignore SIGINT, what nohup starts SIGHUP, and processes pass that on to those that they
# start, which are to hear both here.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What a test sets up writes to a stream that is closed after it: later tests' lines must not go there."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def no_other_s_settings() -> Iterator[None]:
    """What a test makes the coordinator's modules keep would be the next test's database."""
    yield
    if "fedssl_coordinator.db" in sys.modules:
        is_clean = is_of_this_environment()
        if not is_clean:
            forget()  # this test's error, and no other's
        assert is_clean, "call support.coordinator.forget when the environment is as it was"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread: the same bits every time, and no fight for the cores with the tests' own processes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Postgres with a migrated template database, and Valkey."""
    folder = tmp_path_factory.mktemp("servers")
    with Servers(folder) as running:
        # Celery's app reads the broker's address when it is imported, once for the whole session.
        os.environ["FEDSSL_REDIS_URL"] = running.redis_url
        yield running


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server that speaks S3; take a bucket of your own."""
    with ObjectStore(tmp_path_factory.mktemp("objects")) as running:
        yield running


@pytest.fixture
def database_url(servers: Servers) -> Iterator[str]:
    """A migrated database of the test's own."""
    with servers.database() as url:
        yield url


@pytest.fixture
def coordinator(servers: Servers, database_url: str, tmp_path: Path) -> Iterator[Coordinator]:
    """The API under uvicorn in this process. Nothing aggregates but `coordinator.advance`."""
    with Coordinator(database_url, servers.redis_url, tmp_path / "store") as running:
        yield running
