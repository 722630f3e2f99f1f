"""The option with which `make golden` rewrites the curves."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, which exists if this folder is given on the command line, as in `make golden`."""
    parser.addoption("--rewrite-curves", action="store_true", help="write the golden curves instead of comparing")


@pytest.fixture(scope="session")
def rewrites(pytestconfig: pytest.Config) -> bool:
    """Return whether this run rewrites the curves."""
    return bool(pytestconfig.getoption("--rewrite-curves", default=False))
