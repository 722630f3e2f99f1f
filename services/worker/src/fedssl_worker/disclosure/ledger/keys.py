"""Ed25519 keys in files, which are created at the first start and which only their owner may read."""

import shlex
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

from fedssl.files import write_atomically
from fedssl_worker.disclosure.ledger.entries import LedgerError


class SigningKey:
    """Signs for one ledger, or for one worker. `public` is the public key in hexadecimal, which identifies it."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self.private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        """Return the signature in hexadecimal."""
        return self.private.sign(message).hex()


def is_signed_by(public: str, signature: str, message: bytes) -> bool:
    """Return whether this key made this signature (hexadecimal) of the message."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def make_key(path: Path) -> SigningKey:
    """Create a key and write it to the disk."""
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(path, pem, mode=0o600)
    return SigningKey(private)


def read_key(path: Path, what: str = "ledger's key") -> SigningKey:
    """Return the key in a file; `what` names it. Raises LedgerError if it cannot be used or if others may read it."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise LedgerError(f"other users may read the {what} {path}: run chmod 600 {shlex.quote(str(path))}")
        private = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise LedgerError(f"cannot read the {what} {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise LedgerError(f"{path} is not a PEM private key without a password: restore the {what}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise LedgerError(f"{path} is not an Ed25519 key: restore the {what}")
    return SigningKey(private)
