"""`fedssl-coordinator`: the processes of the coordinator."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.lazy_group import Group
from fedssl_coordinator.core.cli_errors import OneLineErrorGroup, validation_message
from fedssl_coordinator.storage.retention import commands as retention

app = typer.Typer(
    name="fedssl-coordinator",
    cls=OneLineErrorGroup,
    help="The coordinator's processes. Settings come from the environment: FEDSSL_DATABASE_URL, FEDSSL_REDIS_URL, "
    "FEDSSL_STORE_PATH or FEDSSL_STORE_URL.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Serve metrics at this port of FEDSSL_METRICS_HOST.  [default: FEDSSL_METRICS_PORT]",
    ),
]
token_app = typer.Typer(cls=Group, help="Manage access tokens.", no_args_is_help=True)
app.add_typer(token_app, name="token")
app.command()(retention.collect)
app.command("verify-store")(retention.verify_store)
app.command("hold-collection")(retention.hold_collection)


@app.command()
def api(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port.")] = 8000,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDSSL_TLS_CERT",
            metavar="FILE",
            help="The API's certificate, followed by the intermediate certificates of its CA (PEM).",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="FEDSSL_TLS_KEY", metavar="FILE", help="The certificate's private key (PEM).")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDSSL_TLS_CLIENT_CA",
            metavar="FILE",
            help="Mutual TLS: require a client certificate of this authority (PEM) in addition to a token.",
        ),
    ] = None,
    proxy_headers: Annotated[
        bool,
        typer.Option(
            envvar="FEDSSL_PROXY_HEADERS",
            help="Trust the X-Forwarded-For header of a proxy, so that limits count its callers and not the proxy.",
        ),
    ] = False,
    forwarded_allow_ips: Annotated[
        str,
        typer.Option(
            envvar="FEDSSL_FORWARDED_ALLOW_IPS",
            metavar="ADDRESSES",
            help="The trusted proxies: addresses or networks, separated by commas.",
        ),
    ] = "127.0.0.1",
    insecure_public: Annotated[
        bool,
        typer.Option(
            "--insecure-public",
            envvar="FEDSSL_INSECURE_PUBLIC",
            help="Listen without TLS where other machines can connect. Use it only in a private network.",
        ),
    ] = False,
) -> None:
    """Serve the REST API.

    \b
    Only on this machine, with its own certificate, and behind a proxy:
      fedssl-coordinator api
      fedssl-coordinator api --host 0.0.0.0 --tls-cert api.pem --tls-key api.key
      fedssl-coordinator api --proxy-headers --forwarded-allow-ips 127.0.0.1
    """
    from fedssl_coordinator.http.server import ListenOptions, ServingError, serve

    options = ListenOptions(
        host=host,
        port=port,
        certificate=tls_cert,
        key=tls_key,
        client_ca=tls_client_ca,
        trusted_proxies=forwarded_allow_ips if proxy_headers else None,
        is_insecure_allowed=insecure_public,
    )
    try:
        options.check()
        from fedssl_coordinator.app import create_app

        _set_up()
        serve(create_app(), options)
    except ServingError as error:
        typer.echo(f"fedssl-coordinator: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def aggregator(
    queues: Annotated[
        str, typer.Option(metavar="QUEUES", help="The queues to serve, separated by commas.")
    ] = "aggregate,distill,evaluate,notify",
    metrics_port: MetricsPortOption = None,
) -> None:
    """Run a Celery worker, which does one task at a time. Start more of them to scale.

    \b
    aggregate  advances runs: opens rounds, aggregates updates, closes
               rounds; short tasks
    distill    trains on the coordinator (FLESD's student, FedCA's base
               model); long tasks, on FEDSSL_DEVICE
    evaluate   evaluates encoders; long tasks, on FEDSSL_DEVICE
    notify     sends webhooks and e-mail; the only queue that connects to
               servers outside of the federation

    A process that serves all queues does not aggregate while it distils or evaluates. To have several runs at the
    same time, start at least one process that serves only `aggregate`. Every queue needs a process that serves it.
    """
    from fedssl_coordinator.core.celery_app import QUEUES
    from fedssl_coordinator.core.celery_app import app as celery

    if unknown := [name for name in queues.split(",") if name not in QUEUES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not a queue: use {', '.join(QUEUES)}")
    import fedssl_coordinator.aggregator.tasks  # noqa: F401, registers the tasks
    from fedssl.liveness import keep_touching

    _set_up()
    _serve_metrics(metrics_port)
    keep_touching()
    name = f"{queues.replace(',', '-')}.{os.getpid()}@%h"
    # solo: prefork hangs after torch has run threads in the parent.
    celery.worker_main(
        ["--quiet", "worker", "-n", name, "-P", "solo", "-Q", queues, "-l", "WARNING", "--without-gossip",
         "--without-mingle", "--without-heartbeat"]
    )  # fmt: skip


@app.command()
def beat(metrics_port: MetricsPortOption = None) -> None:
    """Run the scheduler, which starts a sweep for overdue runs and leases every few seconds."""
    from fedssl.liveness import keep_touching
    from fedssl_coordinator.core.celery_app import app as celery

    _set_up()
    _serve_metrics(metrics_port)
    keep_touching()
    celery.start(["--quiet", "beat", "-l", "WARNING", "--pidfile", ""])


@app.command()
def migrate(
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Only wait this long for another process to migrate."),
    ] = None,
) -> None:
    """Upgrade the database to this version's tables. Safe to repeat."""
    from fedssl_coordinator.core.logs import configure_logging
    from fedssl_coordinator.core.migrate import await_upgrade, upgrade

    configure_logging()
    # The kernel ignores SIGTERM for a container's first process without a handler: a waiting pod could not be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if wait is None:
        upgrade()
    elif not await_upgrade(wait):
        typer.echo(f"error: the database did not have this version's tables within {wait:g} s: run migrate", err=True)
        raise typer.Exit(1)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the REST API."""
    import json

    from fedssl_coordinator.app import create_app

    typer.echo(json.dumps(create_app().openapi(), indent=2, sort_keys=True))


def _set_up() -> None:
    """Configure logs, and traces if they are enabled."""
    from fedssl import tracing
    from fedssl_coordinator.core.logs import configure_logging

    try:
        configure_logging()
        tracing.configure("fedssl-coordinator")
    except (ValueError, tracing.TracingUnavailable) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _serve_metrics(port: int | None) -> None:
    from fedssl_coordinator.core.metrics import serve
    from fedssl_coordinator.core.settings import settings

    serve(settings().metrics_host, port or settings().metrics_port)


@token_app.command("create")
def create_token(
    role: Annotated[str, typer.Option(help="admin, operator, viewer or worker.")],
    client: Annotated[str | None, typer.Option(help="The data owner's name, for a worker's token.")] = None,
    label: Annotated[str, typer.Option(help="A description for people.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long it is valid: 90d, 12h.  [default: until it is revoked]")
    ] = None,
) -> None:
    """Create a token and print its secret, which is not stored. The first admin's token is created this way."""
    from pydantic import ValidationError

    from fedssl.protocol.tokens import lifetime
    from fedssl.protocol.views import TokenCreate

    try:
        values = {"role": role, "client_id": client, "label": label}
        request = TokenCreate.model_validate(values | {"lifetime_seconds": lifetime(expires) if expires else None})
    except ValidationError as error:
        typer.echo(f"error: {validation_message(error)}", err=True)
        raise typer.Exit(2) from None
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None

    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.core.problems import ProblemError
    from fedssl_coordinator.identity.tokens import service

    try:
        with transaction() as session:
            secret = service.create(session, request).secret
    except ProblemError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(secret)


if __name__ == "__main__":
    app()
