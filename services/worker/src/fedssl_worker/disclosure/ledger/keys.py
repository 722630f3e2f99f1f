"""The ledger's key: Ed25519, made at the first start, readable by its owner alone."""

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedssl_worker.disclosure.ledger.entries import LedgerError
from fedssl_worker.files import sync


class SigningKey:
    """Signs for this ledger; `public` is its public key in hexadecimal, which names the ledger."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        """The signature in hexadecimal."""
        return self._private.sign(message).hex()


def is_signed_by(public: str, signature: str, message: bytes) -> bool:
    """Whether the signature (hexadecimal) is this key's of the message."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def make_key(path: Path) -> SigningKey:
    """A new key, on the disk before it signs anything."""
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    part = path.with_name(f".{path.name}")
    part.unlink(missing_ok=True)  # an earlier start that was killed
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync(path.parent)
    return SigningKey(private)


def read_key(path: Path) -> SigningKey:
    """The key in a file. Raises LedgerError where it cannot be used or others may read it."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise LedgerError(f"others than its owner may read the ledger's key {path}: run chmod 600 {path}")
        private = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise LedgerError(f"cannot read the ledger's key {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise LedgerError(f"{path} is no private key in PEM form without a password: put the ledger's back") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise LedgerError(f"{path} is not an Ed25519 key: put the ledger's back")
    return SigningKey(private)
