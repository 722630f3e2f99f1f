"""The folder in which `fedssl up` keeps a federation, and a client for the federation in it.

The distribution `fedssl-local` starts the processes. Nothing here needs it: a data owner's machine does without.
"""

import importlib.util
import json
from contextlib import suppress
from pathlib import Path

from fedssl.client import Client
from fedssl.errors import LocalError

HOST = "127.0.0.1"


class FederationFolder:
    """The paths in a federation's folder that tell a client how to connect. Nothing is read before it is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record_path = root / "federation.json"
        self.tokens = root / "tokens"
        self.operator_token = self.tokens / "operator"

    def url(self) -> str | None:
        """Return where the folder's coordinator listens, or last listened; None if the folder has no federation."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            port = json.loads(self.record_path.read_text(encoding="utf-8"))["port"]
            return None if port is None else f"http://{HOST}:{int(port)}"
        return None


def connect(root: Path | str = ".fedssl") -> Client:
    """Return an operator's client for the federation that runs in this folder; close it, or use it in a `with` block.

    Raises LocalError if there is no federation in the folder.
    """
    folder = FederationFolder(Path(root))
    if (url := folder.url()) is None or not folder.operator_token.exists():
        raise LocalError(f"there is no federation in {root}: start one with `fedssl up`, or name its folder")
    return Client(url, folder.operator_token.read_text(encoding="ascii").strip())


def require_launcher() -> None:
    """Raise LocalError if the distribution that starts a federation's processes is not installed."""
    if importlib.util.find_spec("fedssl_local") is None:
        raise LocalError("starting a federation on this machine needs fedssl-local: pip install fedssl-local")
