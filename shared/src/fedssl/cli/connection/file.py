"""The user's own file of named coordinators: addresses, and for each a token or the name of a file that holds one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, ValidationError, field_serializer, field_validator

from fedssl.cli.errors import UsageError
from fedssl.protocol.base import StrictModel

FILE = "connections.json"
_LARGEST_FILE = 1 << 20

ConnectionName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]


class NamedConnection(StrictModel):
    """One coordinator. `token` and `token_file` both None: the token comes from elsewhere."""

    url: str
    token: SecretStr | None = None
    token_file: Path | None = None

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        from fedssl.client import ClientError
        from fedssl.client.connection import checked_url

        try:
            return checked_url(url)
        except ClientError as error:
            raise ValueError(str(error)) from None

    @field_serializer("token", when_used="json")
    def _reveal(self, token: SecretStr | None) -> str | None:
        return None if token is None else token.get_secret_value()


class Connections(StrictModel):
    """The whole file; `current` is the one that is used where nothing else names a coordinator."""

    current: ConnectionName | None = None
    connections: dict[ConnectionName, NamedConnection] = {}

    def get(self, name: str) -> NamedConnection:
        """One of them. Raises UsageError, naming those that there are."""
        if (found := self.connections.get(name)) is not None:
            return found
        known = ", ".join(sorted(self.connections)) or "none yet"
        raise UsageError(f"there is no connection {name!r} (there are: {known}): `fedssl connection add NAME URL`")


def connections_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the file is: in $XDG_CONFIG_HOME/fedssl, else in ~/.config/fedssl."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "fedssl" / FILE


def read_connections(path: Path | None = None) -> Connections:
    """What is in the file, nothing where there is none. Raises UsageError where it cannot be read."""
    place = path or connections_path()
    try:
        with place.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise UsageError(f"{place} is larger than 1 MiB: it is no file of connections; move it away")
        return Connections.model_validate_json(content)
    except FileNotFoundError:
        return Connections()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        what = ".".join(map(str, first["loc"])) or "the whole"
        raise UsageError(f"{place} cannot be read ({what}: {first['msg']}): mend it, or move it away") from None


def write_connections(connections: Connections, path: Path | None = None) -> None:
    """Replace the file whole, readable by its owner alone."""
    from fedssl.local.server import write_private

    place = path or connections_path()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(place, connections.model_dump_json(indent=2, exclude_none=True, ensure_ascii=True) + "\n")
