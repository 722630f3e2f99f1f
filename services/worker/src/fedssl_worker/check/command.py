"""The command `fedssl-worker check`. Imports torch only if it is called."""

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.errors import FedSSLError
from fedssl_worker.options import options_of
from fedssl_worker.settings import Settings, read_settings

EXIT_WRONG, EXIT_SETTINGS = 1, 2

EPILOG = """
It takes the options and variables of `fedssl-worker run`. It registers nothing, uses no token, and sends no image,
label, update or metric. The coordinator is asked for its health and its time. It writes nothing into STATE, unless
--report is given: then a worker with this STATE registers with the numbers of this check, as far as its policy allows
metrics `check/problems`, `check/update_bytes`, `check/broadcast_bytes` and `check/seconds_per_round`.

With --spec, the spec of a run (the file spec.json of its page, or spec.yaml of `fedssl run pull`), it compares the run
with the policy, trains 20 steps on a sample of the images, and estimates how long a round takes.

Exit codes: 0 everything is well, apart from notes; 1 something is wrong; 2 unusable options or spec.

Example: fedssl-worker check --coordinator https://HOST --data ~/images --state ~/.fedssl-worker --spec spec.json
"""

_SPEC = inspect.Parameter(
    "spec",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(metavar="FILE", help="The spec of a run: TOML, YAML or JSON.")],
)
_REPORT = inspect.Parameter(
    "report",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--report", help="Let the worker register with the numbers of this check.")
    ],
)
_FORMAT = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=Format.TABLE, annotation=FormatOption)


@options_of(Settings, _SPEC, _REPORT, _FORMAT)
def check(*, spec: Path | None = None, report: bool = False, output: Format = Format.TABLE, **options: Any) -> None:
    """Check images, labels, policy, device and connection before the site joins, and send nothing."""
    from fedssl.cli.doctor.findings import Found
    from fedssl.cli.specs import read_spec
    from fedssl.protocol.work import CheckNumbers
    from fedssl_worker.check.report import checked
    from fedssl_worker.check_numbers import write_numbers
    from fedssl_worker.logs import set_up_logging

    try:
        settings = read_settings(options)
        set_up_logging("error")
        run = None if spec is None else read_spec(str(spec))
        found = checked(settings, run)
        wrong = [each.name for each in found.checks if each.found is Found.WRONG]
        if report:
            numbers = CheckNumbers(
                method=None if run is None else run.method.name,
                problems=len(wrong),
                update_bytes=found.update_bytes,
                broadcast_bytes=found.broadcast_bytes,
                seconds_per_round=found.seconds_per_round,
            )
            note(f"a worker registers with the numbers in {write_numbers(settings.state, numbers)}")
    except (FedSSLError, ValueError) as error:
        typer.echo(f"fedssl-worker: {error}", err=True)
        raise typer.Exit(EXIT_SETTINGS) from None
    if output is Format.JSON:
        show_json(
            {
                "ok": not wrong,
                "checks": [asdict(each) for each in found.checks],
                "update_bytes": found.update_bytes,
                "broadcast_bytes": found.broadcast_bytes,
                "seconds_per_round": found.seconds_per_round,
            }
        )
    else:
        show_table(["", "check", "found", "what to do"], [(c.found, c.name, c.what, c.todo) for c in found.checks])
        if found.seconds_per_round is not None:
            minutes = found.seconds_per_round / 60
            shown = f"{minutes:,.1f}" if minutes >= 0.1 else "less than 0.1"
            note(f"expected training time: {shown} minutes per round, without transfers")
    if wrong:
        typer.echo(
            f"fedssl-worker: {len(wrong)} of {len(found.checks)} checks found a problem: {', '.join(wrong)}", err=True
        )
        raise typer.Exit(EXIT_WRONG)
