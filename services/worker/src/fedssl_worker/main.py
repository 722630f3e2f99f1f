"""The `fedssl-worker` command. Imports torch only to run a worker, so that `--help` is fast."""

import os
import time
from typing import Any

import typer

from fedssl.cli.lazy_group import Group
from fedssl.cli.usage import OneLineUsage
from fedssl.errors import DataError
from fedssl.liveness import Health, keep_touching, report
from fedssl_worker.check.command import EPILOG as CHECK_EPILOG
from fedssl_worker.check.command import check
from fedssl_worker.commands import identity, ledger_app, policy_app
from fedssl_worker.encoder_commands import classify, embed
from fedssl_worker.options import options_of
from fedssl_worker.page.command import page
from fedssl_worker.settings import Settings, SettingsError, read_settings


class WorkerGroup(OneLineUsage, Group):
    """All commands of the worker."""

    error_prefix = "fedssl-worker"


app = typer.Typer(
    name="fedssl-worker",
    cls=WorkerGroup,
    help="Trains for one data owner of a fedssl federation. Images and labels stay on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks can show local variables
)
app.add_typer(ledger_app, name="ledger")
app.add_typer(policy_app, name="policy")
app.command("identity")(identity)
app.command("page")(page)
app.command("check", epilog=CHECK_EPILOG)(check)
app.command("embed")(embed)
app.command("classify")(classify)

EXIT_SETTINGS = 2
STAY_VARIABLE = "FEDSSL_STAY_UNHEALTHY"

_EPILOG = """
At its first start a worker needs a single-use enrolment token, in FEDSSL_WORKER_ENROLMENT_TOKEN or in a file with
permissions 600 (--enrolment-token-file). The worker then creates a token of its own and keeps it in STATE. A token that
was created for it is read from FEDSSL_WORKER_TOKEN or from such a file (--token-file). Secrets are not options, because
other users can see a command line. Every option can also be set by a variable: --retry-seconds is
FEDSSL_WORKER_RETRY_SECONDS.

What leaves this machine: the tensors that the run's method declares (`fedssl method show NAME`), its metrics, such as
the loss, and the number of images. A --policy allows less. Every artifact is recorded in STATE/ledger before it is
sent: `fedssl-worker ledger show` lists them.

The process can be stopped or killed at any moment. Started again with the same STATE, it continues where it stopped.

Exit codes: 0 stopped on request; 1 unexpected error, or the GPU was lost; 2 unusable settings or images; 3 refused by
the coordinator. Another start does not help after 2 and 3. With FEDSSL_STAY_UNHEALTHY=true the worker then stays until
it is stopped, so that a container is unhealthy and is not restarted forever: `python -m fedssl.liveness --ready` prints
the reason.

Example: fedssl-worker run --coordinator http://127.0.0.1:8000 --data ~/images --state ~/.fedssl-worker
"""


@app.callback()
def _root() -> None:
    """Make typer treat `run` as a command even if it is the only one."""


@app.command(epilog=_EPILOG)
@options_of(Settings)
def run(**options: Any) -> None:
    """Train for a coordinator until the process is stopped."""
    report(Health.STARTING, "the worker is still starting")  # first, because an empty file means ready
    keep_touching()
    try:
        code = _run(read_settings(options))
    except (SettingsError, DataError) as error:
        typer.echo(f"fedssl-worker: {error}", err=True)
        report(Health.UNREADY, str(error))
        code = EXIT_SETTINGS
    if code >= EXIT_SETTINGS and os.environ.get(STAY_VARIABLE, "").lower() in ("1", "true", "yes"):
        _stay_until_stopped()
    raise typer.Exit(code)


def _stay_until_stopped() -> None:
    from fedssl_worker.shutdown import ShutdownRequested, shutdown_on_signals

    try:
        with shutdown_on_signals():
            typer.echo("fedssl-worker: this has to be corrected; then start the worker again", err=True)
            while True:
                time.sleep(3600)
    except ShutdownRequested:
        return


def _run(settings: Settings) -> int:
    from fedssl import tracing
    from fedssl_worker.logs import set_up_logging
    from fedssl_worker.shutdown import ShutdownRequested, exit_immediately, shutdown_on_signals

    try:
        set_up_logging(settings.log_level)
        tracing.configure("fedssl-worker")
    except (ValueError, tracing.TracingUnavailable) as error:
        raise SettingsError(str(error)) from None
    try:
        with shutdown_on_signals():
            from fedssl_worker.bootstrap import run_worker

            return run_worker(settings)
    except (ShutdownRequested, KeyboardInterrupt):  # StrictModel.model_dump_json raises the latter
        exit_immediately()
