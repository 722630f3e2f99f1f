"""The option with which `make golden` writes the curves."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, which exists if this folder is named on the command line, as in `make golden`."""
    parser.addoption("--rewrite-curves", action="store_true", help="write the golden curves instead of comparing")


@pytest.fixture(scope="session")
def rewrites(pytestconfig: pytest.Config) -> bool:
    """Return whether this run writes the curves."""
    return bool(pytestconfig.getoption("--rewrite-curves", default=False))
