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
It takes the options and variables of `fedssl-worker run`. It registers nothing, uses no token, sends no image, label,
update or metric, and writes nothing into STATE. The coordinator is asked for its health and its time.

With --spec, the spec of a run (`fedssl run show RUN --format json`, or the file spec.json of its page), it compares the
run with the policy, trains 20 steps on a sample of the images, and estimates how long a round takes.

Exit codes: 0 everything is well, apart from notes; 1 something is wrong; 2 unusable options or spec.

Example: fedssl-worker check --coordinator https://HOST --data ~/images --state ~/.fedssl-worker --spec spec.json
"""

_SPEC = inspect.Parameter(
    "spec",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(metavar="FILE", help="The spec of a run: TOML, YAML or JSON.")],
)
_FORMAT = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=Format.TABLE, annotation=FormatOption)


@options_of(Settings, _SPEC, _FORMAT)
def check(*, spec: Path | None = None, output: Format = Format.TABLE, **options: Any) -> None:
    """Check images, labels, policy, device and connection before the site joins, and send nothing."""
    from fedssl.cli.doctor.findings import Found
    from fedssl.cli.specs import read_spec
    from fedssl_worker.check.report import checked
    from fedssl_worker.logs import set_up_logging

    try:
        settings = read_settings(options)
        set_up_logging("error")
        report = checked(settings, None if spec is None else read_spec(str(spec)))
    except (FedSSLError, ValueError) as error:
        typer.echo(f"fedssl-worker: {error}", err=True)
        raise typer.Exit(EXIT_SETTINGS) from None
    wrong = [each.name for each in report.checks if each.found is Found.WRONG]
    if output is Format.JSON:
        show_json(
            {
                "ok": not wrong,
                "checks": [asdict(each) for each in report.checks],
                "update_bytes": report.update_bytes,
                "broadcast_bytes": report.broadcast_bytes,
                "seconds_per_round": report.seconds_per_round,
            }
        )
    else:
        show_table(["", "check", "found", "what to do"], [(c.found, c.name, c.what, c.todo) for c in report.checks])
        if report.seconds_per_round is not None:
            minutes = report.seconds_per_round / 60
            shown = f"{minutes:,.1f}" if minutes >= 0.1 else "less than 0.1"
            note(f"expected training time: {shown} minutes per round, besides transfers")
    if wrong:
        typer.echo(
            f"fedssl-worker: {len(wrong)} of {len(report.checks)} checks found a problem: {', '.join(wrong)}", err=True
        )
        raise typer.Exit(EXIT_WRONG)
