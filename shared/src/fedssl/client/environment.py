"""The coordinator that the environment names, and the folder of a local federation."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedssl.client.errors import ClientError

HOST = "127.0.0.1"
LOCAL_FOLDER = Path(".fedssl")
_MAX_TOKEN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator's address and a token for it. The repr hides the token."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"Target({self.url!r})"


class FederationFolder:
    """The paths in a federation's folder that a client needs to connect. Nothing is read until it is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record_path = root / "federation.json"
        self.tokens = root / "tokens"
        self.operator_token = self.tokens / "operator"

    def url(self) -> str | None:
        """Return where the folder's coordinator listens, or last listened, or None if the folder has no federation."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            port = json.loads(self.record_path.read_text(encoding="utf-8"))["port"]
            return None if port is None else f"http://{HOST}:{int(port)}"
        return None


def target_of(environment: Mapping[str, str], folder: Path = LOCAL_FOLDER) -> Target:
    """Return the address and the token that the variables name, or else those in `folder`. Raises ClientError."""
    local = FederationFolder(folder)
    local_url = local.url()
    url = environment.get("FEDSSL_URL") or local_url
    if not url:
        raise ClientError(
            f"no coordinator: set FEDSSL_URL, or start one with `fedssl up` in this folder ({folder} is not here)"
        )
    if token := environment.get("FEDSSL_TOKEN", "").strip():
        return Target(url, token)
    path = Path(environment["FEDSSL_TOKEN_FILE"]) if environment.get("FEDSSL_TOKEN_FILE") else None
    # The local token is sent only to the local coordinator.
    if path is None and url.rstrip("/") == local_url:
        path = local.operator_token
    if path is None:
        raise ClientError(f"no token for {url}: set FEDSSL_TOKEN_FILE or FEDSSL_TOKEN")
    return Target(url, read_token(path))


def read_token(path: Path) -> str:
    """Read the token in a file. Raises ClientError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_TOKEN_BYTES + 1)  # a device such as /dev/zero has no end
        if len(content) > _MAX_TOKEN_BYTES:
            raise ClientError(f"{path} is larger than any token: give the file that has only the token")
        token = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not a text file")
        raise ClientError(f"cannot read the token in {path}: {reason}") from None
    if not token:
        raise ClientError(f"{path} is empty: write a token into it")
    return token
