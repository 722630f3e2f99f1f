"""The folder in which `fedssl up` keeps a federation, and a client for the federation in it.

The distribution `fedssl-local` starts the processes. This module does not need it, nor does a data owner's machine.
"""

from pathlib import Path

from fedssl.client import Client
from fedssl.client.environment import HOST, FederationFolder
from fedssl.errors import LocalError
from fedssl.packages import is_installed

__all__ = ["HOST", "FederationFolder", "connect", "require_launcher"]


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
    if not is_installed("fedssl_local"):
        raise LocalError("starting a federation on this machine needs fedssl-local: pip install fedssl-local")
