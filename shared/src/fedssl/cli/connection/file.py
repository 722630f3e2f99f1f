"""The user's file of named coordinators: the address of each, and its token or the path of a file with it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, ValidationError, field_serializer, field_validator

from fedssl.cli.errors import UsageError
from fedssl.protocol.base import StrictModel
from fedssl.protocol.validation import first_problem

FILE = "connections.json"
_MAX_BYTES = 1 << 20

ConnectionName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]


class NamedConnection(StrictModel):
    """One coordinator. If `token` and `token_file` are both None, the token comes from the environment."""

    url: str
    token: SecretStr | None = None
    token_file: Path | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        from fedssl.client import ClientError
        from fedssl.client.connection import checked_url

        try:
            return checked_url(url)
        except ClientError as error:
            raise ValueError(str(error)) from None

    @field_validator("token_file")
    @classmethod
    def _check_token_file(cls, path: Path | None) -> Path | None:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError("a path that is not UTF-8 cannot be stored: rename it, or give --copy-token") from None
        return path

    @field_serializer("token", when_used="json")
    def _reveal(self, token: SecretStr | None) -> str | None:
        return None if token is None else token.get_secret_value()


class Connections(StrictModel):
    """The contents of the file. `current` is used if nothing else names a coordinator."""

    current: ConnectionName | None = None
    connections: dict[ConnectionName, NamedConnection] = {}

    def get(self, name: str) -> NamedConnection:
        """Return one connection. Raises UsageError, which lists the names that exist."""
        if (found := self.connections.get(name)) is not None:
            return found
        known = ", ".join(sorted(self.connections)) or "none yet"
        raise UsageError(f"there is no connection {name!r} (known: {known}); add it: `fedssl connection add NAME URL`")


def connections_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file: in $XDG_CONFIG_HOME/fedssl if that is set, else in ~/.config/fedssl."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "fedssl" / FILE


def read_connections(path: Path | None = None) -> Connections:
    """Read the file; if there is none, return no connections. Raises UsageError if it cannot be read."""
    place = path or connections_path()
    try:
        with place.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"{place} is larger than 1 MiB, so it is not a file of connections: move it away")
        return Connections.model_validate_json(content)
    except FileNotFoundError:
        return Connections()
    except ValidationError as error:
        first = first_problem(error)
        key = first.place or "the whole file"
        raise UsageError(f"{place} cannot be read ({key}: {first.message}): correct it, or move it away") from None


def write_connections(connections: Connections) -> None:
    """Replace the whole file. Only its owner can read it."""
    from fedssl.files import write_private

    place = connections_path()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(place, connections.model_dump_json(indent=2, exclude_none=True, ensure_ascii=True) + "\n")
