"""The `fedssl-worker` command. torch is imported only once there is something to run: `--help` answers at once."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from fedssl.errors import DataError
from fedssl_worker.commands import ledger_app, policy_app
from fedssl_worker.settings import Settings, SettingsError

app = typer.Typer(
    help="Trains for one data owner of a fedssl federation. Images and labels stay on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks can show local variables
)
app.add_typer(ledger_app, name="ledger")
app.add_typer(policy_app, name="policy")

EXIT_SETTINGS = 2

_EPILOG = """
At its first start a worker needs an enrolment token, which serves once: in FEDSSL_WORKER_ENROLMENT_TOKEN or in a file
with permissions 600 (--enrolment-token-file). It makes a token of its own, which stays in STATE. A token that was made
for it comes from FEDSSL_WORKER_TOKEN or such a file (--token-file). Secrets are no options: others could see them.
Every option can be set by a variable too: --retry-seconds is FEDSSL_WORKER_RETRY_SECONDS.

What leaves this machine: the tensors that the run's method declares (`fedssl method show NAME`) and its numbers, the
loss for one; the number of images. A --policy allows less. Every artifact is written into STATE/ledger before it is
sent: `fedssl-worker ledger show` lists them.

The process can be stopped or killed at any moment: started again with the same STATE, it goes on where it was.

Exit codes: 0 asked to stop; 1 unexpected; 2 settings or images that cannot be used; 3 refused by the coordinator.

Example: fedssl-worker run --coordinator http://127.0.0.1:8000 --data ~/images --state ~/.fedssl-worker
"""


@app.callback()
def _root() -> None:
    """Keeps `run` a command of its own."""


@app.command(epilog=_EPILOG)
def run(
    coordinator: Annotated[
        str | None, typer.Option(help="Address of the coordinator, for example https://HOST.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The images: a folder (one sub-folder a class, or loose), an .npz file, or a name."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Folder of this worker's own files; keep it between starts.")
    ] = None,
    enrolment_token_file: Annotated[
        Path | None,
        typer.Option(help="File that holds an enrolment token, readable by you alone; for the first start."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File that holds a token, readable by you alone.", show_default="the one that the worker enrolled with"
        ),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="The only authorities trusted over https (PEM).", show_default="the machine's"),
    ] = None,
    client_cert: Annotated[
        Path | None, typer.Option(help="Certificate (PEM) for a coordinator that asks for one: mutual TLS.")
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(help="Its private key (PEM).", show_default="in the certificate's file")
    ] = None,
    insecure_http: Annotated[
        bool | None,
        typer.Option(
            "--insecure-http", help="Send the token to another machine over plain http: only in a private network."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default="auto")] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; with 1 the results are the same on every machine.", show_default="1"),
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Scale the images to this height and width in pixels.")] = None,
    channels: Annotated[int | None, typer.Option(help="1: make the images grey; 3: RGB.")] = None,
    public_data: Annotated[
        Path | None,
        typer.Option(help="Folder of public images that a run may name; what is similar in them leaves this machine."),
    ] = None,
    max_public_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of disk for public images that are fetched from the coordinator; 0: fetch none.",
            show_default="20000000000",
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="The encoder that this client can train, declared to the coordinator for runs in which clients may "
            "have different ones: resnet18, or { name = 'convnet', widths = [32, 64] }.",
            show_default="whatever a run asks for",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="The data owner's policy, a TOML file: what may leave, whatever a coordinator asks for.",
            show_default="what the run's method declares",
        ),
    ] = None,
    claim_seconds: Annotated[float | None, typer.Option(help="Length of one wait for work.", show_default="25")] = None,
    retry_seconds: Annotated[
        float | None, typer.Option(help="How long one request is retried.", show_default="30")
    ] = None,
    keep_ended_seconds: Annotated[
        float | None,
        typer.Option(help="How long the client states of a run stay after it has ended.", show_default="604800"),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Answer Prometheus at this port.", show_default="it does not")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="The address of --metrics-port.", show_default="127.0.0.1")
    ] = None,
) -> None:
    """Train for a coordinator until stopped."""
    options = dict(locals())
    try:
        settings = _settings({name: value for name, value in options.items() if value is not None})
        code = _run(settings)
    except (SettingsError, DataError) as error:
        typer.echo(f"fedssl-worker: {error}", err=True)
        code = EXIT_SETTINGS
    raise typer.Exit(code)


def _settings(options: dict[str, Any]) -> Settings:
    try:
        return Settings(**options)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_input=False, include_context=False):
            name = str(problem["loc"][0]) if problem["loc"] else "settings"
            option = f"--{name.replace('_', '-')}" if name in Settings.model_fields else name
            missing = problem["type"] == "missing"
            said = str(problem["msg"]).removeprefix("Value error, ")
            lines.append(f"{option}: {'must be given' if missing else said}")
        raise SettingsError("; ".join(lines)) from None


def _run(settings: Settings) -> int:
    from fedssl import tracing
    from fedssl.liveness import keep_touching
    from fedssl_worker.logs import set_up_logging
    from fedssl_worker.shutdown import ShutdownRequested, exit_immediately, shutdown_on_signals

    try:
        set_up_logging(settings.log_level)
        tracing.configure("fedssl-worker")
    except (ValueError, tracing.TracingUnavailable) as error:
        raise SettingsError(str(error)) from None
    keep_touching()
    try:
        with shutdown_on_signals():
            from fedssl_worker.bootstrap import run_worker

            return run_worker(settings)
    except ShutdownRequested:
        exit_immediately()
