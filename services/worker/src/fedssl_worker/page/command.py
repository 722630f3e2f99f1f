"""`fedssl-worker page`: the owner's review of what leaves. Slow imports are inside the function that needs them."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedssl_worker.settings import SettingsError


def serve(state: Path, policy: Path | None, host: str, port: int) -> None:
    """Serve the page until Ctrl-C. Raises SettingsError."""
    from fedssl_worker.page.ledger_index import LedgerIndex
    from fedssl_worker.page.server import PageServer
    from fedssl_worker.page.view import View

    state = state.expanduser()
    if not state.is_dir():
        raise SettingsError(f"--state {state} is not a folder: give the worker's --state")
    index, stop = LedgerIndex(state / "ledger"), threading.Event()
    view = View(state, policy.expanduser() if policy else None, index)
    typer.echo(
        "Open this address in a browser on this machine. It works once; then a new one is printed here.", err=True
    )
    with PageServer(host, port, view, lambda address: typer.echo(address)) as server:
        reader = threading.Thread(target=index.follow, args=(stop,), daemon=True)
        reader.start()
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        stop.set()


def page(
    state: Annotated[
        Path, typer.Option(envvar="FEDSSL_WORKER_STATE", help="The worker's state folder. Nothing in it is changed.")
    ],
    policy: Annotated[
        Path | None, typer.Option(envvar="FEDSSL_WORKER_POLICY", help="The worker's policy, to show what it allows.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on: 127.0.0.1 or ::1, and no other.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port.")] = 8765,
) -> None:
    """Show on this machine what left it, what may leave, and what the current work would send. Stop it with Ctrl-C.

    The worker may be running: the page only reads. It is for one browser at a time, whose address is printed.

    Example: fedssl-worker page --state ~/.fedssl-worker --policy policy.toml
    """
    try:
        serve(state, policy, host, port)
    except SettingsError as error:
        typer.echo(f"fedssl-worker: {error}", err=True)
        raise typer.Exit(2) from None
