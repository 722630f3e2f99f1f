"""Which coordinator a command talks to, and as whom."""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from fedssl.cli.connection.completion import complete_run
from fedssl.cli.errors import NoSuchRun, UsageError
from fedssl.cli.output import note

if TYPE_CHECKING:
    from fedssl.cli.connection.file import NamedConnection
    from fedssl.client import Client

LOCAL_FOLDER = Path(".fedssl")
MIN_PREFIX = 4

chosen_connection: ContextVar[str | None] = ContextVar("chosen_connection", default=None)
"""The name that `--connection` gives, for the length of a command."""

CONNECTION_HELP = (
    "The coordinator is the one of --url, else of --connection, else of FEDSSL_URL, else of FEDSSL_CONNECTION, else of "
    "the local `fedssl up` whose folder .fedssl is here, else of the connection that `fedssl connection use` chose. "
    "The token is the one in --token-file, else the one of --connection, else FEDSSL_TOKEN, else in the file "
    "FEDSSL_TOKEN_FILE, else the connection's or the local federation's own. "
    "Over https the machine's authorities are trusted, or those in the file FEDSSL_CA_FILE alone; "
    "FEDSSL_CLIENT_CERT and FEDSSL_CLIENT_KEY are for a coordinator that asks for a certificate. Over http a token "
    "goes to another machine only with FEDSSL_INSECURE_HTTP=1."
)

UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Address of the coordinator.  [env: FEDSSL_URL; else ./.fedssl]"),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with your token.  [env: FEDSSL_TOKEN, FEDSSL_TOKEN_FILE; else ./.fedssl]",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id, or its beginning (at least 4 characters, if only one fits).",
        autocompletion=complete_run,
    ),
]


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator's address and a token for it, which no repr shows."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"Target({self.url!r})"


def find_target(
    url: str | None,
    token_file: Path | None,
    *,
    connection: str | None = None,
    environment: Mapping[str, str] = os.environ,
    folder: Path = LOCAL_FOLDER,
) -> Target:
    """Options first, then the environment, then the local federation in `folder`, then the user's chosen connection.

    Raises:
        UsageError: nothing names a coordinator, or a token for it.
    """
    from fedssl.local.folder import Folder

    local = Folder(folder)
    local_url = local.url()
    named = None
    if not url and (connection or not environment.get("FEDSSL_URL")):
        named = _named(connection, environment, others=local_url is None)
    chosen = url or (named.url if named else environment.get("FEDSSL_URL") or local_url)
    if not chosen:
        raise UsageError(
            "no coordinator: give --url, set FEDSSL_URL, name one with `fedssl connection add NAME URL`, or start one "
            "with `fedssl up` and run this in the same folder"
        )
    if token_file is None and connection and (token := _token_of(named)):
        return Target(chosen, token)
    given = environment.get("FEDSSL_TOKEN", "").strip()
    file = token_file or (None if given else environment.get("FEDSSL_TOKEN_FILE"))
    if file:
        return Target(chosen, read_token(Path(file)))
    if token := given or _token_of(named):
        return Target(chosen, token)
    # Only to its own coordinator: a secret is not tried out on others.
    if local_url is not None and chosen.rstrip("/") == local_url and local.operator_token.exists():
        return Target(chosen, read_token(local.operator_token))
    raise UsageError(f"no token for {chosen}: give --token-file, or set FEDSSL_TOKEN_FILE or FEDSSL_TOKEN")


def _named(wanted: str | None, environment: Mapping[str, str], *, others: bool) -> "NamedConnection | None":
    """The connection that was asked for; with `others`, else the one in use."""
    name = wanted or environment.get("FEDSSL_CONNECTION")
    if not name and not others:
        return None
    from fedssl.cli.connection.file import connections_path, read_connections

    known = read_connections(connections_path(environment))
    return None if not (name := name or known.current) else known.get(name)


def _token_of(named: "NamedConnection | None") -> str:
    """The connection's own token, empty where it has none."""
    if named is None:
        return ""
    if named.token_file is not None:
        return read_token(named.token_file.expanduser())
    return "" if named.token is None else named.token.get_secret_value()


def read_token(path: Path) -> str:
    """The token in a file. Raises UsageError."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o044:
            note(f"warning: others can read the token in {path}: run chmod 600 {path}")
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {path}: {getattr(error, 'strerror', 'not a text file')}") from None
    if not token:
        raise UsageError(f"{path} is empty: put a token into it")
    return token


@contextmanager
def connect(url: str | None, token_file: Path | None, *, patience_seconds: float = 3.0) -> "Iterator[Client]":
    """An operator's client; it tries for so long to reach a coordinator that does not answer."""
    target = find_target(url, token_file, connection=chosen_connection.get())
    import logging

    from fedssl.client import Client, Retry, Tls

    # What it says while it tries again is for those who watch; the last error says it all.
    logging.getLogger("fedssl.client").addHandler(logging.NullHandler())

    tls = Tls.from_environment(os.environ)
    with Client(target.url, target.token, retry=Retry(seconds=patience_seconds), tls=tls) as client:
        yield client


def find_run(client: "Client", text: str) -> UUID:
    """The run whose id is `text` or begins with it.

    Raises:
        NoSuchRun: none, or several.
        UsageError: it is too short, or no part of an id.
    """
    try:
        return UUID(text)
    except ValueError:
        wanted = text.lower().replace("-", "")
    if len(wanted) < MIN_PREFIX or set(wanted) - set("0123456789abcdef"):
        raise UsageError(f"{text!r} is no run: give its id, or at least the first {MIN_PREFIX} characters of it")
    fitting = [run.id for run in client.runs() if run.id.hex.startswith(wanted)]
    if not fitting:
        raise NoSuchRun(f"no run's id begins with {text}: `fedssl run ls` shows the runs")
    if len(fitting) > 1:
        raise NoSuchRun(f"{len(fitting)} runs' ids begin with {text}: give more of it")
    return fitting[0]


def short(run_id: Any) -> str:
    """The first characters of a run's id, enough to name it by hand."""
    return str(run_id)[:8]
