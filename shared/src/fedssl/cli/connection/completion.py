"""What the shell offers where a name is asked for. What cannot be had offers nothing: completing never says a word."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from fedssl.errors import FedSSLError

if TYPE_CHECKING:
    from fedssl.client import Client

PATIENCE_SECONDS = 2.0
_RUNS_OFFERED = 50
_SHORT = 8


def complete_run(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Beginnings of the newest runs' ids, with what they are."""
    from itertools import islice

    with _asking() as found, _client(ctx) as client:
        for run in islice(client.runs(), _RUNS_OFFERED):
            name = str(run.id)[: max(_SHORT, len(incomplete))]
            if name.startswith(incomplete.lower()):
                found.append((name, f"{run.name}, {run.outcome or run.state}"))
    return found


def complete_client(ctx: typer.Context, incomplete: str) -> list[str]:
    """Data owners' names."""
    with _asking() as found, _client(ctx) as client:
        found += [view.id for view in client.clients() if view.id.startswith(incomplete)]
    return found


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Methods of this installation."""
    from fedssl.protocol.methods import METHOD_CONFIGS

    return [(name, config.info.title) for name, config in METHOD_CONFIGS.items() if name.startswith(incomplete)]


def complete_connection(incomplete: str) -> list[tuple[str, str]]:
    """Names in the user's file of connections."""
    from fedssl.cli.connection.file import read_connections

    try:
        known = read_connections().connections
    except (FedSSLError, OSError):
        return []
    return [(name, known[name].url) for name in sorted(known) if name.startswith(incomplete)]


@contextmanager
def _asking() -> Iterator[list[Any]]:
    """A list to fill; whatever goes wrong leaves it as it is, and the terminal quiet."""
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
    from fedssl.client import Client, Retry

    connection = ctx.find_root().params.get("connection")
    target = find_target(ctx.params.get("url"), ctx.params.get("token_file"), connection=connection)
    with Client(target.url, target.token, timeout=PATIENCE_SECONDS, retry=Retry(seconds=0)) as client:
        yield client
