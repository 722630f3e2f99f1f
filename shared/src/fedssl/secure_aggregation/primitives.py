"""Key agreement, key derivation, sealed messages and signatures: all of `cryptography`, with fedssl's names and errors.

Every key, nonce and secret comes from the operating system's random numbers, or derives from such a secret. This
package cannot import `fedssl.seeding` (import-linter): the run's seed is public.
"""

import os

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedssl.protocol.secure_work import SECURE_PROTOCOL
from fedssl.secure_aggregation.errors import InvalidMessage

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16

_DOMAIN = f"fedssl/secagg/{SECURE_PROTOCOL}|"
"""The version of the protocol is part of every derived key, and of everything that is hashed, signed and sealed."""


def label(*parts: str) -> bytes:
    """Return the bytes that separate one use of a hash or a key from all others.

    >>> label("pair", "a", "b")
    b'fedssl/secagg/2|pair|a|b'
    """
    return (_DOMAIN + "|".join(parts)).encode()


def random_secret() -> bytes:
    """Return 32 random bytes."""
    return os.urandom(KEY_BYTES)


def agree(private: bytes, public: bytes) -> bytes:
    """Return the X25519 secret (RFC 7748) of a private and a public key, 32 bytes each.

    Raises InvalidMessage if the public key has low order: the secret would be 0 for everyone.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise InvalidMessage("the X25519 public key has low order or the wrong size: send a new key") from None


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private key, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def derive(secret: bytes, context: bytes, info: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    """Return bytes of HKDF-SHA256 (RFC 5869) of a secret, with the context as its salt."""
    return HKDF(hashes.SHA256(), num_bytes, context, info).derive(secret)


def seal(key: bytes, text: bytes, associated: bytes) -> bytes:
    """Return a random nonce and the AES-256-GCM ciphertext: 28 bytes more than the text."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, associated)


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Return the text. Raises InvalidMessage unless this key sealed exactly this, with this associated data."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], associated)
    except (InvalidTag, ValueError):
        raise InvalidMessage("the sealed message was changed, or sealed for another client") from None


def is_signed_by(identity: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether this Ed25519 public key (RFC 8032) made this signature of the message."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
