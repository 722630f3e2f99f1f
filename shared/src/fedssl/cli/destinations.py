"""Where a command writes its results, which is checked before anything is computed."""

import os
from pathlib import Path

from fedssl.cli.errors import UsageError


def require_folder(option: str, folder: Path) -> None:
    """Raise UsageError if no files can be written into this folder, which may not exist yet. Creates nothing."""
    _require(option, folder, folder)


def require_place(option: str, file: Path) -> None:
    """Raise UsageError if this file cannot be written. Its folder may not exist yet. Creates nothing."""
    if os.path.lexists(file) and not file.is_file():
        raise UsageError(f"{option} {file}: it is a folder, a device or a pipe, not a file")
    _require(option, file, file.parent)


def _require(option: str, given: Path, folder: Path) -> None:
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise UsageError(f"{option} {given}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {given}: the folder {there} cannot be written")
