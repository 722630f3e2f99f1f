"""Runs a command in a test: `fedssl("run", "ls")`. The functions here do so in this process, without a coordinator."""

import json
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from fedssl.cli.main import app

Fedssl = Callable[..., Result]


def fedssl(*arguments: object) -> Result:
    """Return the result of a command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def json_of(result: Result) -> Any:
    """Return the JSON document on standard output of a command, which must have succeeded."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def output_of(*arguments: object) -> Any:
    """Return what a command prints as JSON. It must succeed."""
    return json_of(fedssl(*arguments, "--format", "json"))


def error_of(*arguments: object) -> str:
    """Return the error of a command that must refuse its arguments, and print nothing else."""
    result = fedssl(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr
