"""A worker's first start: it exchanges an enrolment token, which others may have seen, for a token of its own.

The worker creates its token itself, and the coordinator stores the hash. The token is on the disk before the
coordinator learns of it, so after a crash or a lost response the worker repeats the same request.

    token.json            the token in use, and the hash of the enrolment token that it came from
    token.enrolling.json  a token that the coordinator may not know yet
"""

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog
from pydantic import Field, ValidationError

from fedssl.files import sync, write_atomically
from fedssl.protocol.base import Digest, StrictModel
from fedssl.protocol.work import Enrolled
from fedssl_worker.settings import SettingsError

log = structlog.get_logger()

_TOKEN, _ENROLLING = "token.json", "token.enrolling.json"


class _StoredToken(StrictModel):
    """A token that this worker created. `enrolment` is the hash of the enrolment token, which is not stored."""

    format: Literal[1] = 1
    enrolment: Digest
    secret: str = Field(repr=False, min_length=40)


def enrolled_token(folder: Path, enrolment: str | None, enrol: Callable[[str, str], Enrolled]) -> str | None:
    """Return the token of this worker, which enrols if necessary, or None if it has not enrolled and cannot.

    Args:
        folder: the worker's state folder, locked.
        enrolment: an enrolment token. The one that the stored token came from is not used again.
        enrol: sends a token's hash, its second argument, with an enrolment token, its first.

    Raises SettingsError if a stored token cannot be read or written, and what `enrol` raises.
    """
    kept = _read(folder / _TOKEN)
    if enrolment is None or (kept is not None and kept.enrolment == _hash(enrolment)):
        return None if kept is None else kept.secret
    pending = _read(folder / _ENROLLING)
    if pending is None or pending.enrolment != _hash(enrolment):
        pending = _StoredToken(enrolment=_hash(enrolment), secret=f"fedssl_{secrets.token_urlsafe(32)}")
        _write(folder / _ENROLLING, pending)
    enrolled = enrol(enrolment, _hash(pending.secret))
    (folder / _ENROLLING).replace(folder / _TOKEN)
    sync(folder)
    log.info("worker.enrolled", client=enrolled.client_id, token=str(enrolled.token_id))
    return pending.secret


def stored_token(folder: Path) -> str | None:
    """Return the token that this worker enrolled with, or None. Raises SettingsError if it cannot be read."""
    kept = _read(folder / _TOKEN)
    return None if kept is None else kept.secret


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(path: Path) -> _StoredToken | None:
    try:
        return _StoredToken.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError):
        raise SettingsError(
            f"{path} cannot be read, or another version wrote it: remove it, and enrol again with a new enrolment "
            "token (`fedssl token enrol CLIENT`)"
        ) from None


def _write(path: Path, kept: _StoredToken) -> None:
    try:
        write_atomically(path, kept.model_dump_json().encode(), mode=0o600)
    except OSError as error:
        raise SettingsError(f"cannot write this worker's token to {path}: {error.strerror}") from None
