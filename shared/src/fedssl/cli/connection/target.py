"""Which coordinator a command connects to, and with which token."""

import os
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedssl.cli.connection.choice import LOCAL_FOLDER
from fedssl.cli.connection.file import NamedConnection, connections_path, read_connections
from fedssl.cli.errors import NoToken, UsageError
from fedssl.cli.output import note
from fedssl.client.environment import Target
from fedssl.client.environment import read_token as read
from fedssl.client.errors import ClientError
from fedssl.local import FederationFolder


def find_target(
    url: str | None,
    token_file: Path | None,
    *,
    connection: str | None = None,
    environment: Mapping[str, str] = os.environ,
    folder: Path = LOCAL_FOLDER,
) -> Target:
    """Choose by the options first, then the environment, the local federation in `folder`, the chosen connection.

    Raises:
        UsageError: if nothing names a coordinator.
        NoToken: if nothing names a token for it.
    """
    local = FederationFolder(folder)
    local_url = local.url()
    named = None
    if not url and (connection or not environment.get("FEDSSL_URL")):
        named = _find_connection(connection, environment, use_current=local_url is None)
    chosen = url or (named.url if named else environment.get("FEDSSL_URL") or local_url)
    if not chosen:
        raise UsageError(
            "no coordinator: give --url, set FEDSSL_URL, name one with `fedssl connection add NAME URL`, or start one "
            "with `fedssl up` and run this command in the same directory"
        )
    if token_file is None and connection and (token := _token_of(named)):
        return Target(chosen, token)
    given = environment.get("FEDSSL_TOKEN", "").strip()
    file = token_file or (None if given else environment.get("FEDSSL_TOKEN_FILE"))
    if file:
        return Target(chosen, read_token(Path(file)))
    if token := given or _token_of(named):
        return Target(chosen, token)
    # The local token goes to its own coordinator only: never send a secret to another one to see whether it fits.
    if local_url is not None and chosen.rstrip("/") == local_url:
        if local.operator_token.exists():
            return Target(chosen, read_token(local.operator_token))
        raise NoToken(
            f"the federation in {folder} has no token yet: wait until `fedssl up` reports that it is up, or restart it"
        )
    raise NoToken(f"no token for {chosen}: give --token-file, or set FEDSSL_TOKEN_FILE or FEDSSL_TOKEN")


def read_token(path: Path) -> str:
    """Read the token in a file. Raises UsageError."""
    with suppress(OSError):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o044:  # a folder, or a device such as /dev/null, would be unusable afterwards
            note(f"warning: other users can read the token in {path}: run chmod 600 {shlex.quote(str(path))}")
    try:
        return read(path)
    except ClientError as error:
        raise UsageError(str(error)) from None


def _find_connection(
    wanted: str | None, environment: Mapping[str, str], *, use_current: bool
) -> NamedConnection | None:
    """Return the connection that the option or the environment names, or the current one if `use_current`."""
    name = wanted or environment.get("FEDSSL_CONNECTION")
    if not name and not use_current:
        return None
    known = read_connections(connections_path(environment))
    return None if not (name := name or known.current) else known.get(name)


def _token_of(named: NamedConnection | None) -> str:
    """Return the connection's own token, or an empty string if it has none."""
    if named is None:
        return ""
    if named.token_file is not None:
        return read_token(named.token_file.expanduser())
    return "" if named.token is None else named.token.get_secret_value()
