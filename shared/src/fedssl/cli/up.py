"""`fedssl up`: a whole federation on this machine, in the foreground."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from fedssl.cli.arguments import SetOption
from fedssl.cli.connection.choice import LOCAL_FOLDER
from fedssl.cli.connection.connect import short
from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json
from fedssl.cli.specs import read_spec
from fedssl.protocol.data import KNOWN_DATASETS, PartitionConfig, Scheme
from fedssl.protocol.model import EncoderConfig, read_encoder
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.validation import first_problem
from fedssl.wording import plural, printable

if TYPE_CHECKING:
    from rich.console import Console

    from fedssl_local.federation import Dealing, Federation

DirectoryOption = Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the whole federation.")]
PortOption = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port of the API; 0: any.  [default: the last one, else 8000, else any]"),
]
DeviceOption = Annotated[
    str, typer.Option(help="Device of the workers and the coordinator: cpu, cuda, cuda:N or auto.")
]
ThreadsOption = Annotated[
    int, typer.Option(min=1, help="CPU threads per worker. 1 gives the same bits on every machine.")
]

_CLIENT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # as fedssl.protocol.base.ClientId
_OPTIONS = {"num_clients": "clients", "dataset": "data", "file": "partition-file"}
_ROUTINE_EVENTS = ("started (pid", "stopping", "stopped")


def up(
    directory: DirectoryOption = LOCAL_FOLDER,
    spec: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Partition the images as in [partition] of this run spec.")
    ] = None,
    set_: SetOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CLIENT=]DATA",
            help="A data set to divide among the clients: fashion-mnist, digits, a folder, an .npz file. Give it "
            "several times to name each client's own images instead: nothing is divided, and a client is called like "
            "its folder, or CLIENT.",
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.  [default: 4]")] = None,
    scheme: Annotated[
        Scheme | None, typer.Option(help="How images are partitioned among clients.  [default: dirichlet]")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Concentration of the dirichlet scheme.  [default: 0.1]")] = None,
    partition_file: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Partition by the indices in this file: the scheme `file`."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the partition.  [default: 0]")] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help="Use only this many images.  [default: all]")] = None,
    port: PortOption = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    encoder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLIENT=ENCODER",
            help="The encoder that a client's worker declares, for runs whose clients may differ (FLESD): "
            "client-1=resnet18, or a table, client-1='{ name = \"convnet\", widths = [16, 32] }'. Repeat the option "
            "for more clients.",
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Run a federation on this machine until Ctrl-C: servers, coordinator, and one worker per client.

    Example: `fedssl up --data digits --clients 3`

    Example: `fedssl up --data scans/site-a --data scans/site-b`

    The first start partitions a data set into one file per client, or copies each client's own images into such a file,
    in one size and with the same number of channels. When you start it again on the same folder, the federation
    continues with the same clients, images, runs and tokens.

    If a worker, the distiller or the evaluator dies six times, each within 20 s of its start, the others continue
    without it, and the exit code is 1 in the end. If any other process does, everything is stopped at once.
    """
    from fedssl.local import require_launcher

    require_launcher()
    if set_ and spec is None:
        raise UsageError("--set changes a key of a spec: give the spec with --spec")
    if partition_file is not None and scheme is None:
        scheme = "file"
    options: dict[str, object] = {
        "num_clients": clients,
        "scheme": scheme,
        "alpha": alpha,
        "file": partition_file,
        "seed": seed,
        "max_images": max_images,
    }
    given = {name: value for name, value in options.items() if value is not None}
    wanted = read_spec(spec, set_) if spec is not None else None
    sources = sources_of(data or [])
    if sources:
        dealing = dealing_of_sources(wanted, sources, given)
    else:
        dealing = dealing_of(wanted, given | ({"dataset": data[0]} if data else {}))
    from fedssl_local.federation import Machine, running_federation
    from fedssl_local.folder import Folder

    folder = Folder(directory)
    folder.require_usable()
    if folder.read() is None:
        for name in dealing.sources.values() or [dealing.partition.dataset]:
            ensure(name, note)
    machine = Machine(port=port, device=device, threads=threads, encoders=encoders_of(encoder or []))
    with running_federation(folder, dealing, machine, on_step=note, on_event=show_event) as federation:
        _introduce(federation, output)
        federation.run_until_stopped()
        note("stopped; `fedssl up` on the same folder continues from here")
        federation.raise_if_given_up()


def dealing_of(spec: RunSpec | None, given: dict[str, Any]) -> "Dealing":
    """Return what to partition and how: as in the spec, except for the given options. Raises UsageError."""
    from fedssl_local.federation import Dealing
    from fedssl_local.folder import shape

    base = spec.partition.model_dump() if spec is not None and spec.partition is not None else {}
    try:
        partition = PartitionConfig.model_validate(base | given)
    except ValidationError as error:
        first = first_problem(error)
        name = str(first.location[0])
        raise UsageError(f"--{_OPTIONS.get(name, name).replace('_', '-')}: {first.message}") from None
    required = partition.model_dump() if base else {name: getattr(partition, name) for name in given}
    if spec is not None:
        required |= shape(spec.data)
    return Dealing(
        partition=partition, data=None if spec is None else spec.data, required=required, data_root=data_folder()
    )


def sources_of(given: list[str]) -> dict[str, str]:
    """Return each client's own images, if `--data` names a client or is given several times. Raises UsageError."""
    named = [_named(text) for text in given]
    if len(given) < 2 and not any(named):
        return {}
    found: dict[str, str] = {}
    for text, pair in zip(given, named, strict=True):
        client, source = pair or (_client_name(text), text)
        if not _CLIENT.fullmatch(client):
            raise UsageError(
                f"--data {text}: {client!r} cannot be a client's name, which has at most 63 lower-case letters, digits "
                "and hyphens: write it as --data CLIENT=FOLDER"
            )
        if client in found:
            raise UsageError(
                f"--data {found[client]} and --data {source} would both be the images of {client}: give them names, as "
                f"in --data site-a={found[client]} --data site-b={source}"
            )
        if not source:
            raise UsageError(f"--data {text}: it names no images: write it as --data CLIENT=FOLDER")
        found[client] = source if source in KNOWN_DATASETS else str(Path(source).expanduser().absolute())
    return found


def dealing_of_sources(spec: RunSpec | None, sources: dict[str, str], given: dict[str, Any]) -> "Dealing":
    """Return clients with images of their own. Raises UsageError if something is given that divides images."""
    from fedssl_local.federation import Dealing
    from fedssl_local.folder import shape

    if given:
        options = ", ".join(f"--{_OPTIONS.get(name, name).replace('_', '-')}" for name in given)
        are = "is" if len(given) == 1 else "are"
        raise UsageError(
            f"{options} {are} for dividing one data set, but --data names the images of {len(sources)} clients, which "
            "are not divided: leave it out, or give --data once"
        )
    if spec is not None and spec.partition is not None:
        raise UsageError(
            "the spec's [partition] divides one data set, but --data names each client's own images: leave "
            "out --spec (or add --set partition=null), or give --data once"
        )
    required: dict[str, Any] = {"sources": sources} | ({} if spec is None else shape(spec.data))
    return Dealing(
        sources=sources, data=None if spec is None else spec.data, required=required, data_root=data_folder()
    )


def _named(text: str) -> tuple[str, str] | None:
    """Return the client and its images of CLIENT=DATA; None if the text is only the name or path of images."""
    client, equals, source = text.partition("=")
    return (client, source) if equals and "/" not in client and not Path(text).exists() else None


def _client_name(path: str) -> str:
    """Return a client's name for a folder or a file: its last part, in lower case, with hyphens.

    >>> _client_name("scans/Site_A"), _client_name("b.npz")
    ('site-a', 'b')
    """
    name = Path(path).expanduser().absolute().name.removesuffix(".npz").lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def encoders_of(given: list[str]) -> dict[str, EncoderConfig]:
    """Return the encoders given by `--encoder`, by client. Raises UsageError."""
    found = {}
    for text in given:
        client, equals, encoder = text.partition("=")
        if not equals:
            raise UsageError(f"--encoder {text}: write it as CLIENT=ENCODER, for example client-1=resnet18")
        try:
            found[client] = EncoderConfig.model_validate(read_encoder(encoder))
        except ValidationError as error:
            raise UsageError(f"--encoder {text}: {first_problem(error).message}") from None
        except ValueError as error:
            raise UsageError(f"--encoder {text}: {error}") from None
    return found


def show_event(name: str, what: str, screen: "Console | None" = None) -> None:
    """Show an event of a process, unless it is a routine one. `screen` is a console with a live display on it."""
    if what.startswith(_ROUTINE_EVENTS):
        return
    if screen is None:
        note(f"{name} {what}")
    else:
        screen.print(f"{name} {what}", soft_wrap=True)


def _introduce(federation: "Federation", output: Format) -> None:
    folder, record = federation.folder, federation.record
    with federation.client() as client:
        unfinished = [run for run in client.runs() if run.state.value in ("created", "running", "paused")]
    token = folder.operator_token.absolute()
    if output is Format.JSON:
        show_json(
            {
                "url": federation.url,
                "token_file": str(token),
                "directory": str(folder.root.absolute()),
                "clients": record.num_images,
                "partition": record.partition,
                "sources": record.sources,
                "unfinished_runs": [str(run.id) for run in unfinished],
            }
        )
        return
    images = ", ".join(f"{name} {count:,}" for name, count in list(record.num_images.items())[:8])
    more = f" and {len(record.num_images) - 8} more" if len(record.num_images) > 8 else ""
    typer.echo(f"The federation is up at {federation.url}")
    whose = "each client's own images" if record.partition is None else f"images of {record.partition.dataset}"
    typer.echo(f"  {whose}: {images}{more}")
    for run in unfinished:
        typer.echo(f"  run {short(run.id)} ({printable(run.name)}): {run.state}, {run.rounds_closed} of "
                   f"{plural(run.num_rounds, 'round')}")  # fmt: skip
    if folder.root.absolute() == LOCAL_FOLDER.absolute():
        typer.echo("  from this directory `fedssl run submit SPEC --watch` finds it; in another directory, first run:")
    else:
        typer.echo("  to use it, first run:")
    typer.echo(f"    export FEDSSL_URL={federation.url} FEDSSL_TOKEN_FILE={shlex.quote(str(token))}")
    typer.echo(f"  logs are in {folder.log('x').parent}; Ctrl-C stops it, and `fedssl up` continues later")
