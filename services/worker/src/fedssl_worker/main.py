"""The `fedssl-worker` command. torch is imported only once there is something to run: `--help` answers at once."""

from typing import Any

import typer
from pydantic import ValidationError

from fedssl.errors import DataError
from fedssl_worker.commands import ledger_app, policy_app
from fedssl_worker.options import describe_mistakes, options_of
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
@options_of(Settings)
def run(**options: Any) -> None:
    """Train for a coordinator until stopped."""
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
        raise SettingsError(describe_mistakes(error, Settings)) from None


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
