"""A file for a secret that a coordinator shows only once."""

import sys
from pathlib import Path

from fedssl.cli.errors import UsageError

_PROBE = " " * 4096  # as large as what is written later, so that a full disk is noticed


def require_new_file(path: Path | None) -> None:
    """Raise UsageError if the file exists, or cannot be written. Creates its folder. None is standard output.

    Call this before the secret is created: one that cannot be written is lost.
    """
    if path is None:
        if sys.stdout is None:
            raise UsageError("standard output is closed, and the secret is shown only once: give --out FILE")
        return
    if path.exists():
        raise UsageError(f"{path} exists: remove it, or choose another file")
    from fedssl.files import write_private

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, _PROBE)
        path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): choose another file") from None
