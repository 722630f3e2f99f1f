"""Shell completion of names. If they cannot be listed, nothing is offered and nothing is printed."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import typer

from fedssl.errors import FedSSLError

if TYPE_CHECKING:
    from fedssl.client import Client

TIMEOUT_SECONDS = 2.0
_MAX_RUNS = 50
_PREFIX = 8


def complete_run(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer prefixes of the newest runs' ids, each with the run's name and state."""
    with _quietly() as found, _client(ctx) as client:
        for run in islice(client.runs(), _MAX_RUNS):
            name = str(run.id)[: max(_PREFIX, len(incomplete))]
            if name.startswith(incomplete.lower()):
                found.append((name, f"{run.name}, {run.outcome or run.state}"))
    return found


def complete_client(ctx: typer.Context, incomplete: str) -> list[str]:
    """Offer the names of data owners."""
    with _quietly() as found, _client(ctx) as client:
        found += [view.id for view in client.clients() if view.id.startswith(incomplete)]
    return found


def complete_connection(incomplete: str) -> list[tuple[str, str]]:
    """Offer the names in the user's file of connections, each with its address."""
    from fedssl.cli.connection.file import read_connections

    try:
        known = read_connections().connections
    except (FedSSLError, OSError):
        return []
    return [(name, known[name].url) for name in sorted(known) if name.startswith(incomplete)]


@contextmanager
def _quietly() -> Iterator[list[Any]]:
    """Yield a list to fill. An error leaves it as it is and prints nothing."""
    logging.disable(logging.CRITICAL)
    try:
        yield []
    except (FedSSLError, OSError):
        pass
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _client(ctx: typer.Context) -> "Iterator[Client]":
    from fedssl.cli.connection.target import find_target
    from fedssl.client import Client, Retry, Tls

    connection = ctx.find_root().params.get("connection")
    target = find_target(ctx.params.get("url"), ctx.params.get("token_file"), connection=connection)
    tls, at_once = Tls.from_environment(os.environ), Retry(seconds=0)
    with Client(target.url, target.token, timeout=TIMEOUT_SECONDS, retry=at_once, tls=tls) as client:
        yield client
