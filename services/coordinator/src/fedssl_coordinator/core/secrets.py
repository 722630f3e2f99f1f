"""Secrets that all processes of the coordinator share: one signing key in Postgres, and keys derived from it."""

import functools
import hmac

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import SigningKey


def signing_key(session: Session) -> Ed25519PrivateKey:
    """Return the coordinator's signing key, and create it if it does not exist yet."""
    private = session.scalar(select(SigningKey.private_key))
    if private is None:
        created = Ed25519PrivateKey.generate().private_bytes_raw().hex()
        session.execute(insert(SigningKey).values(id=1, private_key=created).on_conflict_do_nothing())
        private = session.scalar(select(SigningKey.private_key))
        assert private is not None, "this process or another has created it"
    return key_of(private)


@functools.lru_cache(maxsize=2)
def key_of(private: str) -> Ed25519PrivateKey:
    """Return the signing key with these private bytes, in hexadecimal as they are stored."""
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))


def derived_key(session: Session, purpose: str) -> bytes:
    """Return a secret of 32 bytes for one purpose, derived from the signing key: equal in all API processes."""
    return hmac.digest(signing_key(session).private_bytes_raw(), purpose.encode(), "sha256")
