"""`fedssl-coordinator`: the processes of the coordinator."""

import os
from typing import Annotated

import typer

app = typer.Typer(
    help="The coordinator's processes. Settings come from the environment: FEDSSL_DATABASE_URL, FEDSSL_REDIS_URL, "
    "FEDSSL_STORE_PATH.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
token_app = typer.Typer(help="Access tokens.", no_args_is_help=True)
app.add_typer(token_app, name="token")


@app.command()
def api(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
) -> None:
    """Serve the REST API."""
    import uvicorn

    from fedssl_coordinator.app import create_app
    from fedssl_coordinator.logs import configure_logging

    configure_logging()
    uvicorn.run(create_app(), host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=3)


@app.command()
def aggregator(
    queues: Annotated[
        str, typer.Option(metavar="QUEUES", help="Which of the three to serve, separated by commas.")
    ] = "aggregate,distill,evaluate",
) -> None:
    """Run a Celery worker, which computes one thing at a time. Scale by starting more of them.

    \b
    aggregate  moves runs on: opens rounds, aggregates updates, closes rounds; quick
    distill    trains on the coordinator (FLESD's student, FedCA's base model); long, on FEDSSL_DEVICE
    evaluate   judges encoders; long, on FEDSSL_DEVICE

    One process that serves all three aggregates nothing while it distils or evaluates. For more than one run at a time
    start at least one for `aggregate` alone. Every queue needs somebody who serves it.
    """
    from fedssl.liveness import keep_touching
    from fedssl_coordinator.celery_app import QUEUES
    from fedssl_coordinator.celery_app import app as celery
    from fedssl_coordinator.logs import configure_logging

    if unknown := [name for name in queues.split(",") if name not in QUEUES]:
        raise typer.BadParameter(f"{unknown[0]!r} is no queue: there are {', '.join(QUEUES)}")
    configure_logging()
    keep_touching()
    name = f"{queues.replace(',', '-')}.{os.getpid()}@%h"
    # solo: prefork hangs once torch has run threads in the parent.
    celery.worker_main(
        ["worker", "-n", name, "-P", "solo", "-Q", queues, "-l", "WARNING", "--without-gossip", "--without-mingle",
         "--without-heartbeat"]
    )  # fmt: skip


@app.command()
def beat() -> None:
    """Run the clock: a sweep every few seconds that finds runs and leases past due."""
    from fedssl.liveness import keep_touching
    from fedssl_coordinator.celery_app import app as celery
    from fedssl_coordinator.logs import configure_logging

    configure_logging()
    keep_touching()
    celery.start(["beat", "-l", "WARNING", "--pidfile", ""])


@app.command()
def migrate(
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Change nothing: wait this long for somebody else to do it."),
    ] = None,
) -> None:
    """Bring the database to this version's tables. Safe to repeat."""
    from fedssl_coordinator.logs import configure_logging
    from fedssl_coordinator.migrate import await_upgrade, upgrade

    configure_logging()
    if wait is None:
        upgrade()
    elif not await_upgrade(wait):
        typer.echo(f"error: the database has not got this version's tables within {wait:g} s: run migrate", err=True)
        raise typer.Exit(1)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the REST API."""
    import json

    from fedssl_coordinator.app import create_app

    typer.echo(json.dumps(create_app().openapi(), indent=2, sort_keys=True))


@token_app.command("create")
def create_token(
    role: Annotated[str, typer.Option(help="admin, operator, viewer or worker.")],
    client: Annotated[str | None, typer.Option(help="The data owner's name, for a worker's token.")] = None,
    label: Annotated[str, typer.Option(help="A note for people.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="For how long it is valid: 90d, 12h.  [default: until revoked]")
    ] = None,
) -> None:
    """Make a token and print its secret, which is stored nowhere. The first admin's token is made like this."""
    from fedssl.protocol.tokens import lifetime
    from fedssl.protocol.views import TokenCreate
    from fedssl_coordinator.db import transaction
    from fedssl_coordinator.problems import ProblemError
    from fedssl_coordinator.tokens import service

    try:
        values = {"role": role, "client_id": client, "label": label}
        request = TokenCreate.model_validate(values | {"lifetime_seconds": lifetime(expires) if expires else None})
        with transaction() as session:
            secret = service.create(session, request).secret
    except (ValueError, ProblemError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(secret)


if __name__ == "__main__":
    app()
