"""Option for the device on which the demonstration computes."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of all processes: cpu, cuda or cuda:N")
