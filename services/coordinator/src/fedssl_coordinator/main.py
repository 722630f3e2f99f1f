"""`fedssl-coordinator`: the processes of the coordinator."""

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
    queues: Annotated[str, typer.Option(help="Celery queues to serve, separated by commas.")] = "aggregate",
) -> None:
    """Run a Celery worker that aggregates. Scale by starting more of them."""
    from fedssl_coordinator.celery_app import app as celery
    from fedssl_coordinator.logs import configure_logging

    configure_logging()
    # solo: prefork hangs once torch has run threads in the parent.
    celery.worker_main(
        ["worker", "-P", "solo", "-Q", queues, "-l", "WARNING", "--without-gossip", "--without-mingle",
         "--without-heartbeat"]
    )  # fmt: skip


@app.command()
def beat() -> None:
    """Run the clock: a sweep every few seconds that finds runs and leases past due."""
    from fedssl_coordinator.celery_app import app as celery
    from fedssl_coordinator.logs import configure_logging

    configure_logging()
    celery.start(["beat", "-l", "WARNING", "--pidfile", ""])


@app.command()
def migrate() -> None:
    """Bring the database to this version's tables. Safe to repeat."""
    from fedssl_coordinator.logs import configure_logging
    from fedssl_coordinator.migrate import upgrade

    configure_logging()
    upgrade()


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the REST API."""
    import json

    from fedssl_coordinator.app import create_app

    typer.echo(json.dumps(create_app().openapi(), indent=2, sort_keys=True))


@token_app.command("create")
def create_token(
    role: Annotated[str, typer.Option(help="operator or worker.")],
    client: Annotated[str | None, typer.Option(help="The data owner's name, for a worker's token.")] = None,
    label: Annotated[str, typer.Option(help="A note for people.")] = "",
) -> None:
    """Make a token and print its secret, which is stored nowhere."""
    from pydantic import ValidationError

    from fedssl.protocol.views import TokenCreate
    from fedssl_coordinator.db import transaction
    from fedssl_coordinator.problems import ProblemError
    from fedssl_coordinator.tokens import service

    try:
        request = TokenCreate.model_validate({"role": role, "client_id": client, "label": label})
        with transaction() as session:
            secret = service.create(session, request).secret
    except (ValidationError, ProblemError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(secret)


if __name__ == "__main__":
    app()
