"""The option with which `make golden` writes."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known if this folder is named on the command line, as `make golden` does."""
    parser.addoption("--rewrite-curves", action="store_true", help="write the golden curves instead of comparing")


@pytest.fixture(scope="session")
def rewrites(pytestconfig: pytest.Config) -> bool:
    """Whether this run writes the curves."""
    return bool(pytestconfig.getoption("--rewrite-curves", default=False))
