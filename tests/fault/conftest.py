"""The suite's options, its federations, and the table at its end."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault.arena import Arena
from fault.injected import Injected

_SEED, _FAULTS = 7, 200
_INJECTED = pytest.StashKey[Injected]()
_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where this folder is named on the command line, as `make fault` does."""
    parser.addoption("--fault-seed", type=int, help="what the faults are drawn from", default=_SEED)
    parser.addoption("--faults", type=int, help="how many faults, at least", default=_FAULTS)
    parser.addoption("--fault-report", type=Path, help="write the summary to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BEGAN] = time.monotonic()


@pytest.fixture(scope="session")
def injected(pytestconfig: pytest.Config) -> Injected:
    """Every fault of this process."""
    return pytestconfig.stash.setdefault(_INJECTED, Injected())


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
    """A generator of the test's own: a test that is run alone draws the same."""
    return random.Random(f"{seed}/{request.node.name}")


@pytest.fixture(scope="session")
def arena(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A federation for all tests that need no other."""
    with Arena(tmp_path_factory.mktemp("arena"), injected) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(arena: Arena) -> None:
    """Whatever the test before has done, this one finds everything alive."""
    arena.heal()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A violation is shown when it happens: the end may be half an hour away."""
    if report.failed and report.nodeid.startswith("tests/fault/fault_"):
        print(f"\n{report.longreprtext}")  # noqa: T201


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Faults by kind, and how often a promise was broken."""
    injected = config.stash.get(_INJECTED, None)
    if injected is None or not injected.faults:
        return
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    broken = [report.nodeid for report in reports if report.nodeid.startswith("tests/fault/")]
    seconds = round(time.monotonic() - config.stash.get(_BEGAN, time.monotonic()))
    seed = config.getoption("--fault-seed", _SEED)
    terminalreporter.section(f"faults, drawn from seed {seed}")
    for kind, number in injected.by("kind").items():
        terminalreporter.write_line(f"{number:5}  {kind}")
    total = len(injected.faults)
    terminalreporter.write_line(f"{total:5}  in all, in {seconds} s; violations {len(broken)}")
    path = config.getoption("--fault-report", None)
    if path is not None:
        numbers = {name: injected.by(*name.split(", ")) for name in ("kind", "target", "point", "kind, target, point")}
        summary = {"seed": seed, "faults": total, "seconds": seconds, "violations": len(broken), "broken": broken}
        path.write_text(json.dumps({**summary, "by": numbers}, indent=2) + "\n", encoding="utf-8")
