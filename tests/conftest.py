"""Fixtures for all tests that need servers: coordinators, a real Postgres and a real Redis-protocol server."""

import argparse
import functools
import gc
import logging
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
import typer.testing

from fedssl_coordinator.core.logs import CHATTY

if TYPE_CHECKING:  # the process that only distributes the tests needs neither torch nor the coordinator
    from support.coordinator import Coordinator
    from support.object_store import ObjectStore
    from support.servers import Servers

# Background jobs of a shell ignore SIGINT, and programs started by nohup ignore SIGHUP. Child processes inherit that,
# but the processes that tests start must react to both.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Until a command configures logging, structlog would write a traceback with all variables, which takes a second.
*_processors, _ = structlog.get_config()["processors"]
_renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*_processors, _renderer])

# A command is built once, not for each of its calls.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# The longest files come first: if a long one started last, the other test processes would be idle meanwhile.
LONGEST = (
    "tests/parity/test_heterogeneous.py",
    "tests/parity/test_parity.py",
    "tests/integration/cli/test_up.py",
    "tests/integration/coordinator/core/test_queues.py",
    "tests/docs/test_executed.py",
    "tests/parity/",
    "tests/fault/",
    "tests/unit/parallel/",
    "tests/model/",
    "tests/integration/coordinator/aggregator/",
    "tests/integration/coordinator/",
    "tests/integration/",
    "tests/unit/engine/",
    "tests/contract/",
    "tests/unit/cli/",
    "tests/unit/experiments/",
    "tests/unit/worker/",
)

GOLDEN = "tests/golden/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run the long tests too, and those that take long with every method"
    )
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="with --full: only part K of N of the long tests, and the golden curves of all methods",
    )


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N, such as 1/2")
    return int(number), int(parts)


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--full"):
        number, parts = config.getoption("--part")
        which = "" if parts == 1 else f", part {number} of {parts} of them and all golden curves"
        return f"full: the long tests too, with all methods{which}"
    return "without the long tests, and with only the representative methods where many take long; --full runs all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first. Deselect tests marked `full`, unless --full or their own name selects them, and
    tests of other parts. The golden curves belong to every part."""
    number, parts = config.getoption("--part") if config.getoption("--full") else (0, 1)
    named = {Path(argument).name for argument in config.args}
    left_out = {
        item
        for item in _long(items)
        if Path(item.nodeid).name not in named
        and not (number and item.nodeid.startswith(GOLDEN))
        and zlib.crc32(item.nodeid.encode()) % parts != number - 1
    }
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=_place)


def _long(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests marked `full`, without the first parameters that a marker such as `full(but=2)` keeps."""
    num_seen: Counter[str] = Counter()
    for item in items:
        if marker := item.get_closest_marker("full"):
            function = item.nodeid.partition("[")[0]
            num_seen[function] += 1
            if num_seen[function] > marker.kwargs.get("but", 0):
                yield item


def _place(item: pytest.Item) -> int:
    """Return the item's place in the order. The sort keeps the order of items with equal places."""
    return next((n for n, beginning in enumerate(LONGEST) if item.nodeid.startswith(beginning)), len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude from garbage collection what lives as long as the process: imported modules and collected tests.

    Each search through them would take a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test with the same random numbers, so that a failure is repeated in any order of the tests.

    `torch.manual_seed` would keep a seed and a stack trace per test for a GPU that most tests do not use.
    """
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Undo what a command sets up in this process, after each test, as if the command had its own process.

    Otherwise its logging would write to a stream that is already closed, and its handlers would end the process.
    """
    root, chatty = logging.getLogger(), list(map(logging.getLogger, CHATTY))
    handlers, levels = list(root.handlers), [logger.level for logger in (root, *chatty)]
    log_lines, at_term = structlog.get_config(), signal.getsignal(signal.SIGTERM)
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, *chatty), levels, strict=True):
        if logger.level != level:  # each call clears the caches of all loggers
            logger.setLevel(level)
    structlog.configure(**log_lines)
    signal.signal(signal.SIGTERM, at_term)


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Fail a test that leaves settings or a database in the coordinator's modules, where the next test would use
    them."""
    yield
    if "fedssl_coordinator.core.db" not in sys.modules:
        return
    from support.coordinator import caches_match_environment, clear_caches

    if not caches_match_environment():
        clear_caches()  # so that only this test fails
        pytest.fail("call support.coordinator.forget once the environment is as it was: see change_settings")


@pytest.fixture
def change_settings() -> Iterator[Callable[..., None]]:
    """Yield `change_settings(DEVICE="cpu")`, which changes the coordinator's settings for the rest of the test."""
    from fedssl_coordinator.core.settings import settings

    def change(**values: str | int) -> None:
        for name, value in values.items():
            patch.setenv(f"FEDSSL_{name}", str(value))
        settings.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        yield change
    settings.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread, so that results have the same bits every time, and other cores are free for the tests'
    processes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Servers]":
    """Yield Postgres with a migrated template database, and Valkey."""
    from support.servers import Servers

    folder = tmp_path_factory.mktemp("servers")
    with Servers(folder) as running:
        # Celery's app reads the broker's address when it is imported, once for the whole session.
        os.environ["FEDSSL_REDIS_URL"] = running.redis_url
        yield running


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ObjectStore]":
    """Yield a server that speaks S3. Each test must use its own bucket."""
    from support.object_store import ObjectStore

    with ObjectStore(tmp_path_factory.mktemp("objects")) as running:
        yield running


@pytest.fixture
def database_url(servers: "Servers") -> Iterator[str]:
    """Yield the address of a migrated database for this test only."""
    with servers.database() as url:
        yield url


@pytest.fixture
def empty_url(servers: "Servers") -> Iterator[str]:
    """Yield the address of a database without tables."""
    with servers.database(empty=True) as url:
        yield url


@pytest.fixture
def coordinator(servers: "Servers", database_url: str, tmp_path: Path) -> "Iterator[Coordinator]":
    """Yield the API under uvicorn in this process. Only `coordinator.advance` aggregates."""
    from support.coordinator import Coordinator

    with Coordinator(database_url, servers.redis_url, tmp_path / "store") as running:
        yield running
