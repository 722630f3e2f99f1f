"""`fedssl-coordinator collect`, `verify-store` and `hold-collection`."""

from typing import Annotated

import typer

from fedssl.wording import plural

EXIT_FAULT = 1


def collect(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove from the store what no run needs any more. `beat` also starts this every FEDSSL_COLLECT_SECONDS.

    \b
    update        single clients' updates of closed rounds
                  (FEDSSL_KEEP_UPDATES_SECONDS)
    broadcast     old rounds' weights, but not a run's first, newest and best
                  (FEDSSL_KEEP_BROADCASTS_SECONDS)
    unreferenced  unregistered data sets, artifacts of deleted runs
                  (FEDSSL_KEEP_UNREFERENCED_SECONDS)
    abandoned     the remains of interrupted uploads
    """
    from fedssl_coordinator.storage.retention import collection

    try:
        totals = collection.collect(dry_run=dry_run)
    except OSError as error:
        typer.echo(f"error: the store failed: {error}", err=True)
        raise typer.Exit(EXIT_FAULT) from None
    if totals is None:
        detail = "another collection is running, or hold-collection prevents it during a backup: try again later"
        typer.echo(f"error: {detail}", err=True)
        raise typer.Exit(EXIT_FAULT)
    for kind in sorted(totals.counts):
        typer.echo(f"{kind:<14}{totals.counts[kind]:>8} {totals.num_bytes[kind]:>16,} bytes")
    total = f"{plural(totals.counts.total(), 'artifact')}, {plural(totals.num_bytes.total(), 'byte')}"
    typer.echo(f"{'would remove' if dry_run else 'removed'} {total}")


def verify_store() -> None:
    """Read every artifact that the database refers to, and compare its bytes with its digest.

    Exits with 1 if one is missing or damaged. Run it after a restore, before the other processes start.
    """
    from fedssl_coordinator.storage.retention import verification

    num_checked = num_bytes = num_faults = 0
    for checked in verification.verify_store():
        num_checked += 1
        num_bytes += checked.num_bytes
        if checked.fault is not None:
            num_faults += 1
            typer.echo(f"{checked.digest} {checked.fault}", err=True)
    faults = plural(num_faults, "fault") if num_faults else "no faults"
    typer.echo(f"{plural(num_checked, 'artifact')}, {plural(num_bytes, 'byte')}: {faults}")
    if num_faults:
        raise typer.Exit(EXIT_FAULT)


def hold_collection(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The command and its arguments, after --.", show_default=False),
    ],
) -> None:
    """Run a command while nothing is removed from the store, such as a backup of the database and then of the store.

    Exits with the command's exit code, or with 1 if the connection to the database broke meanwhile, so that something
    may have been removed. Example: fedssl-coordinator hold-collection -- sh backup.sh
    """
    import subprocess

    from fedssl_coordinator.core.db import UNREACHABLE
    from fedssl_coordinator.storage.retention import collection

    code = None
    try:
        with collection.held_up():
            try:
                code = subprocess.run(command, check=False).returncode
            except OSError as error:
                typer.echo(f"error: cannot run {command[0]}: {error.strerror}", err=True)
                code = 127
    except UNREACHABLE:
        if code is None:
            raise
        detail = "the connection to the database broke while the command ran, so something may have been removed"
        typer.echo(f"error: {detail}: run it again", err=True)
        code = code or EXIT_FAULT
    raise typer.Exit(code)
