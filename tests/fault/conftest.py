"""The suite's options, its federations, and the table that it prints at the end."""

import json
import os
import random
import shlex
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from fault.federation import FaultFederation
from fault.injected import HELD, VIOLATION, Injected
from fault.report import counted, table
from support import traces

_SEED, _FAULTS = 7, 200
_INJECTED = pytest.StashKey[Injected]()
_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which exist if this folder is given on the command line, as in `make fault`."""
    parser.addoption("--fault-seed", type=int, help="what the faults are drawn from", default=_SEED)
    parser.addoption("--faults", type=int, help="how many faults, at least", default=_FAULTS)
    parser.addoption("--fault-report", type=Path, help="write the summary to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BEGAN] = time.monotonic()


@pytest.fixture(scope="session")
def injected(pytestconfig: pytest.Config) -> Injected:
    """Return the record of all faults of this process."""
    return pytestconfig.stash.setdefault(_INJECTED, Injected())


@pytest.fixture(autouse=True)
def fault_class(injected: Injected, request: pytest.FixtureRequest) -> None:
    """Count the test's faults in the class of its module."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("fault_").removeprefix("test_")
    injected.begin(getattr(request.module, "FAULT_CLASS", name.replace("_", " ")))


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    found = pytestconfig.getoption("--fault-seed", _SEED)
    print(f"faults are drawn from seed {found}")  # noqa: T201 - shown with a failure
    return int(found)


@pytest.fixture(scope="session")
def num_faults(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--faults", _FAULTS))


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Return the test's own random generator, so that a test that is run alone draws the same numbers."""
    return random.Random(f"{seed}/{request.node.name}")


@pytest.fixture(scope="session")
def federation(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFederation]:
    """Yield a federation for all tests that do not need another one."""
    with FaultFederation(tmp_path_factory.mktemp("federation"), injected) as running:
        yield running


@pytest.fixture(autouse=True)
def all_services_running(federation: FaultFederation) -> Iterator[None]:
    """Restart everything that an earlier test has left dead.

    After the test, the events of every run, even of an unfinished one, must be a path of the state machines.
    """
    federation.heal()
    yield
    federation.heal()
    with federation.tables() as tables:
        federation.traced.update(traces.check_all(tables, *federation.traced))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the faults that the test has not settled the outcome of the test."""
    report = yield
    if report.when == "call" and (injected := item.config.stash.get(_INJECTED, None)) is not None:
        injected.settle(VIOLATION if report.failed else HELD)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a violation when it happens, because the end of the suite may be half an hour later."""
    if report.failed and report.nodeid.startswith("tests/fault/fault_"):
        print(f"\n{report.longreprtext}")  # noqa: T201


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of faults by class, with their outcomes, and write it as JSON."""
    injected = config.stash.get(_INJECTED, None)
    if injected is None or not injected.faults:
        return
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    broken = [report.nodeid for report in reports if report.nodeid.startswith("tests/fault/")]
    seconds = round(time.monotonic() - config.stash.get(_BEGAN, time.monotonic()))
    seed, total, command = config.getoption("--fault-seed", _SEED), len(injected.faults), _command(config)
    terminalreporter.section(f"faults, drawn from seed {seed}")
    for line in table(injected.classes()):
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"{total} faults in {seconds} s; violations: {len(broken)}")
    terminalreporter.write_line(f"command: {command}")
    path = config.getoption("--fault-report", None)
    if path is not None:
        numbers = {name: injected.by(*name.split(", ")) for name in ("kind", "target", "point", "kind, target, point")}
        summary = {"seed": seed, "command": command, "faults": total, "seconds": seconds}
        found = {"violations": len(broken), "broken": broken, "classes": counted(injected.classes()), "by": numbers}
        path.write_text(json.dumps({**summary, **found}, indent=2) + "\n", encoding="utf-8")


def _command(config: pytest.Config) -> str:
    """Return the command that repeats this run: make's, or pytest's own."""
    if command := os.environ.get("FEDSSL_FAULT_COMMAND"):
        return command
    return shlex.join([Path(sys.executable).name, "-m", "pytest", *config.invocation_params.args])
