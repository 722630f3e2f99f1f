"""Runs a command in a test: `fedssl("run", "ls")`."""

from collections.abc import Callable

from typer.testing import Result

Fedssl = Callable[..., Result]
