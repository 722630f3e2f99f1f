"""Opening a connection to the coordinator that a command is to use."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fedssl.cli.connection.choice import chosen_connection
from fedssl.cli.errors import NoSuchRun, UsageError

if TYPE_CHECKING:
    from fedssl.client import Client

MIN_PREFIX = 4


@contextmanager
def connect(url: str | None, token_file: Path | None, *, patience_seconds: float = 3.0) -> "Iterator[Client]":
    """Open an operator's client. It retries for `patience_seconds` if the coordinator does not answer."""
    from fedssl.cli.connection.target import find_target
    from fedssl.client import Client, Retry, Tls

    target = find_target(url, token_file, connection=chosen_connection.get())
    # Silence the warning before each retry: only `watch` shows it, and the final error has the reason.
    logging.getLogger("fedssl.client").addHandler(logging.NullHandler())
    tls = Tls.from_environment(os.environ)
    with Client(target.url, target.token, retry=Retry(seconds=patience_seconds), tls=tls) as client:
        yield client


def find_run(client: "Client", text: str) -> UUID:
    """Return the id of the run whose id is `text` or begins with it.

    Raises:
        NoSuchRun: if no run, or more than one, has such an id.
        UsageError: if `text` is too short, or cannot be part of an id.
    """
    try:
        return UUID(text)
    except ValueError:
        wanted = text.lower().replace("-", "")
    if len(wanted) < MIN_PREFIX or set(wanted) - set("0123456789abcdef"):
        raise UsageError(f"{text!r} is not a run: give its id, or at least the first {MIN_PREFIX} characters of it")
    matching = [run.id for run in client.runs() if run.id.hex.startswith(wanted)]
    if not matching:
        raise NoSuchRun(f"no run has an id that begins with {text}: `fedssl run ls` lists the runs")
    if len(matching) > 1:
        raise NoSuchRun(f"{len(matching)} runs have ids that begin with {text}: give more characters")
    return matching[0]


def short(run_id: Any) -> str:
    """Return the first characters of an id, enough to type."""
    return str(run_id)[:8]
