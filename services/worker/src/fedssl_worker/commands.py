"""`fedssl-worker ledger verify|show|broadcasts`, `policy check` and `identity`.

Slow imports are inside the commands that need them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.lazy_group import Group
from fedssl.cli.output import Format, FormatOption, note, show_json, show_pairs, show_table
from fedssl.errors import FedSSLError

if TYPE_CHECKING:
    from fedssl_worker.disclosure.ledger.verification import Report

ledger_app = typer.Typer(cls=Group, help="Read and verify the ledger of what left this machine.", no_args_is_help=True)
policy_app = typer.Typer(cls=Group, help="Check a policy before a worker uses it.", no_args_is_help=True)

EXIT_UNUSABLE = 2
EXIT_CHANGED = 4

StateOption = Annotated[
    Path, typer.Option(envvar="FEDSSL_WORKER_STATE", help="The worker's state folder, which contains the ledger.")
]

_VERIFY_EPILOG = """
The chain proves, for the key that it names, that no entry was changed, removed or inserted later. The file `head` shows
whether its end was cut off. Only --anchors shows whether `head` was changed too, or the whole ledger was replaced: ask
the coordinator's operator for the output of `fedssl client anchors CLIENT --format json`.

Exit codes: 0 the ledger is intact; 2 the file of an option cannot be used; 4 the ledger was changed, or it cannot
be read.

Example: fedssl-worker ledger verify --state ~/.fedssl-worker --anchors anchors.json
"""


@ledger_app.command(epilog=_VERIFY_EPILOG)
def verify(
    state: StateOption,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            dir_okay=False,
            help="Begin at this checkpoint; earlier segments may have been archived or deleted.",
        ),
    ] = None,
    anchors: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The coordinator's anchors of this ledger, as JSON, to compare the ledger with.",
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check that the ledger was not changed. The worker may be running."""
    from fedssl_worker.disclosure.ledger.chain import read_checkpoint
    from fedssl_worker.disclosure.ledger.verification import read_anchors, verify

    with _errors_end_with(EXIT_UNUSABLE):
        known = read_anchors(anchors) if anchors is not None else ()
    with _errors_end_with(EXIT_CHANGED, "NOT INTACT"):
        report = verify(_folder(state), None if start is None else read_checkpoint(start), known)
    found = _report_fields(report)
    if output is Format.JSON:
        show_json(found)
        return
    show_pairs({name.replace("_", " "): _joined(value) for name, value in found.items()})
    if report.torn_bytes:
        note("The last line is incomplete: the worker is writing it now, or a crash cut it short. It proves nothing.")
    if report.unconfirmed:
        note("Unconfirmed: these artifacts may have left in whole, in part or not at all.")
    note("The ledger is intact.")


@ledger_app.command()
def show(
    state: StateOption,
    run: Annotated[
        str | None, typer.Option(help="Show only entries of this run (the beginning of its id is enough).")
    ] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show entries about the ledger itself: openings, policies, receipts.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the artifacts that left and those that were refused, without verification (see `ledger verify`).

    `sent`: the coordinator has confirmed the artifact. `unconfirmed`: it may have left in whole, in part or not at all.
    `refused`: it may not leave. JSON contains every entry as it was written, with the names of all tensors.
    """
    from fedssl_worker.disclosure.ledger.verification import read_entries

    with _errors_end_with(EXIT_CHANGED):
        entries = [entry.body for entry in read_entries(_folder(state))]
    confirmed = {body["intent"] for body in entries if body["kind"] == "sent" and "intent" in body}
    kinds = ("intent", "refused")
    shown = [
        {**body, "outcome": _outcome(body, confirmed)}
        for body in entries
        if (everything or body["kind"] in kinds) and (run is None or str(body.get("run", "")).startswith(run))
    ]
    if output is Format.JSON:
        show_json(shown)
        return
    columns = ["time", "run", "#round", "what", "kind", "tensors", "#bytes", "digest", "policy"]
    show_table(columns, (_row(body) for body in shown))


_BROADCASTS_EPILOG = """
A coordinator that sends one client other weights than the others can learn more from its update. Owners who exchange
the output with --format json can prove it: the coordinator has signed each digest.

Exit codes: 0 no difference; 4 the coordinator has signed different digests for one round, or a list cannot be used.

Example: fedssl-worker ledger broadcasts --state ~/.fedssl-worker --compare hospital-b.json
"""


@ledger_app.command(epilog=_BROADCASTS_EPILOG)
def broadcasts(
    state: StateOption,
    compare: Annotated[
        Path | None, typer.Option(help="The output of this command with --format json of another owner.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the digests of the weights that the coordinator has signed, per round, or compare them with another's."""
    from fedssl_worker.disclosure.ledger.verification import broadcast_differences, read_broadcasts, signed_broadcasts

    with _errors_end_with(EXIT_CHANGED):
        own = signed_broadcasts(_folder(state))
        num_shared, differences = (0, []) if compare is None else broadcast_differences(own, read_broadcasts(compare))
    if compare is not None:
        for difference in differences:
            typer.echo(f"DIFFERENT: {difference}", err=True)
        if differences:
            raise typer.Exit(EXIT_CHANGED)
        rounds = "the only round" if num_shared == 1 else f"all {num_shared} rounds"
        note(f"The coordinator signed the same broadcast for both clients in {rounds} that both have.")
    elif output is Format.JSON:
        show_json(own)
    else:
        columns = ["run", "#round", "broadcast", "at", "coordinator"]
        show_table(columns, ((r["run"], r["round"], r["broadcast"], r["at"], r["coordinator"][:8]) for r in own))


@policy_app.command()
def check(
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy's TOML file.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Read a policy as a worker does, and show what it allows."""
    from fedssl.protocol.policy import AllowRule
    from fedssl_worker.disclosure.policy import read_policy

    with _errors_end_with(EXIT_UNUSABLE):
        read, digest = read_policy(policy)
    notice = read.described(digest)
    if output is Format.JSON:
        show_json(notice)
    else:
        stores = _joined(read.stores) or "none: all artifacts pass through the coordinator"
        show_pairs({"client": read.client, "coordinator": read.coordinator, "stores": stores, "digest": digest})
        names = tuple(AllowRule.model_fields)  # a dump lacks fields that are not set
        columns = [f"{'#' if name.startswith(('max_', 'min_')) else ''}{name.replace('_', ' ')}" for name in names]
        show_table(columns, ([_joined(getattr(rule, name)) for name in names] for rule in notice.allow))
        if not notice.allow:
            note("Nothing may leave: the policy has no rule.")


def identity(state: StateOption, output: FormatOption = Format.TABLE) -> None:
    """Print this worker's identity key, and the line for the `pins` of other owners' policies.

    Exchange it by another channel than the coordinator: `fedssl client show` has the key that the coordinator claims.
    """
    from fedssl_worker.disclosure.ledger.keys import read_key
    from fedssl_worker.disclosure.ledger.verification import read_entries

    with _errors_end_with(EXIT_UNUSABLE, hint=". A worker makes the key when it starts for the first time"):
        key = f"ed25519:{read_key(state.expanduser() / 'identity.pem', 'identity key').public}"
        client = next((str(e.body["client"]) for e in read_entries(_folder(state)) if e.kind == "receipt"), None)
    found = {"client": client, "identity": key, "pin": f'{client or "CLIENT"} = "{key}"'}
    if output is Format.JSON:
        show_json(found)
        return
    show_pairs(found)
    note("Other owners add the pin to [secagg.pins] of their policies.")


@contextmanager
def _errors_end_with(code: int, prefix: str = "fedssl-worker", hint: str = "") -> Iterator[None]:
    """Turn an error into one line and an exit code."""
    try:
        yield
    except FedSSLError as error:
        typer.echo(f"{prefix}: {error}{hint}", err=True)
        raise typer.Exit(code) from None


def _report_fields(report: "Report") -> dict[str, Any]:
    return {
        "entries": report.num_entries,
        "first": report.first_seq,
        "last": report.point.seq,
        "head": report.point.head,
        "key": report.point.key,
        "segments": report.num_segments,
        "unsigned": report.num_unsigned,
        "receipts": report.num_receipts,
        "coordinators": report.coordinators,
        "anchors_compared": report.num_anchors,
        "unconfirmed": report.unconfirmed,
        "torn_bytes": report.torn_bytes,
    }


def _folder(state: Path) -> Path:
    return state.expanduser() / "ledger"


def _outcome(body: dict[str, Any], confirmed: set[int]) -> str:
    if body["kind"] != "intent":
        return str(body["kind"])
    return "sent" if body["seq"] in confirmed else "unconfirmed"


def _row(body: dict[str, Any]) -> tuple[object, ...]:
    return (
        str(body["time"])[:19].replace("T", " ") + "Z" if "time" in body else None,  # the ledger's clock is UTC
        str(body.get("run", ""))[:8],
        body.get("round"),
        body["outcome"],
        ", ".join(map(str, body.get("artifact", ()))),
        body.get("reason") or _summary(body),
        body.get("bytes"),
        str(body.get("digest", ""))[:12],
        str(body.get("policy", ""))[:8],
    )


def _summary(body: dict[str, Any]) -> str:
    """Return the first parts of the tensors' names, with their counts, and the metrics that were sent with them.

    >>> _summary({"tensors": ["encoder.a", "encoder.b", "centers"], "numbers": ["loss=0.5"]})
    'encoder (2), centers; loss=0.5'
    """
    counts = Counter(str(name).split(".")[0] for name in body.get("tensors", ()))
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
    return "; ".join(part for part in (names, ", ".join(body.get("numbers", ()))) if part)


def _joined(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
