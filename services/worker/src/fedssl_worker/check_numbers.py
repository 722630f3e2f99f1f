"""Stores the numbers of `fedssl-worker check --report`, with which a worker of the same state folder registers."""

from pathlib import Path

from pydantic import ValidationError

from fedssl.files import write_atomically
from fedssl.protocol.work import CheckNumbers
from fedssl_worker.settings import SettingsError

_FILE = "check.json"


def write_numbers(state: Path, numbers: CheckNumbers) -> Path:
    """Write the numbers into a worker's state folder, and return the file. Raises SettingsError."""
    path = state.expanduser() / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, numbers.model_dump_json().encode())
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}") from None
    return path


def read_numbers(state: Path) -> CheckNumbers | None:
    """Return the numbers in a worker's state folder, or None if there are none. Raises SettingsError."""
    path = state.expanduser() / _FILE
    try:
        return CheckNumbers.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        raise SettingsError(
            f"{path} cannot be read, or another version wrote it: repeat `fedssl-worker check --report`, or remove it"
        ) from None
