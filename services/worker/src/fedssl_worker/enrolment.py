"""A worker's first start: an enrolment token, which anybody may have seen on its way, becomes a token of its own.

The worker makes its own token and has the coordinator keep the hash. So it is on the disk before the coordinator knows
of it, and a start that was cut short, or an answer that was lost, is made up for by asking again.

    token.json            the token that is in use, and the hash of the enrolment that it came from
    token.enrolling.json  one that the coordinator may not know yet
"""

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog
from pydantic import Field, ValidationError

from fedssl.protocol.base import Digest, StrictModel
from fedssl.protocol.work import Enrolled
from fedssl_worker.files import sync
from fedssl_worker.settings import SettingsError

log = structlog.get_logger()

_TOKEN, _ENROLLING = "token.json", "token.enrolling.json"


class _StoredToken(StrictModel):
    """A token of the worker's own making. `enrolment` is a hash: the secret behind it is not kept."""

    format: Literal[1] = 1
    enrolment: Digest
    secret: str = Field(repr=False, min_length=40)


def enrolled_token(folder: Path, enrolment: str | None, enrol: Callable[[str, str], Enrolled]) -> str | None:
    """The token that this worker has enrolled with, or enrols with now; None: neither has there been an enrolment.

    Args:
        folder: the worker's state, which nobody else uses at the moment.
        enrolment: an enrolment token. The one that the kept token came from is not used again.
        enrol: sends the second argument, a token's hash, under the first, an enrolment token.

    Raises SettingsError where a kept token cannot be read or written, and what `enrol` raises.
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
    log.info("enrolled", client=enrolled.client_id, token=str(enrolled.token_id))
    return pending.secret


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(path: Path) -> _StoredToken | None:
    try:
        return _StoredToken.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError):
        raise SettingsError(
            f"{path} cannot be read, or was written by another version: remove it, and enrol anew with a new enrolment "
            "token (`fedssl token enrol CLIENT`)"
        ) from None


def _write(path: Path, kept: _StoredToken) -> None:
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(kept.model_dump_json())
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    except OSError as error:
        raise SettingsError(f"cannot keep this worker's token in {path}: {error.strerror}") from None
