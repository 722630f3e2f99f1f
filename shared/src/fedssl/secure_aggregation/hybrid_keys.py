"""Private keys of two kinds in one: X25519 (RFC 7748) and ML-KEM-768 (FIPS 203). An attacker must break both.

Secrets are concatenated, and keys derived from them by HKDF, as NIST SP 800-56C (revision 2, section 2) specifies for
hybrids.
"""

from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey

from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.primitives import (
    KEY_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    agree,
    derive,
    label,
    open_sealed,
    public_key,
    random_secret,
    seal,
)

CIPHERTEXT_BYTES = 1088
PUBLIC_KEY_BYTES = KEY_BYTES + 1184
SEALING_BYTES = CIPHERTEXT_BYTES + NONCE_BYTES + TAG_BYTES
"""How much longer a sealed text is."""

_SEED_BYTES = 64


class HybridKey:
    """The two private keys that derive from one secret of 32 bytes. `public`: both public keys, 1,216 bytes."""

    def __init__(self, context: bytes, secret: bytes) -> None:
        self._context = context
        self._exchange = derive(secret, context, label("x25519"))
        self._encapsulation = MLKEM768PrivateKey.from_seed_bytes(
            derive(secret, context, label("ml-kem-768"), _SEED_BYTES)
        )

    @cached_property
    def public(self) -> bytes:
        """The X25519 public key and then the ML-KEM public key, 1,216 bytes."""
        return public_key(self._exchange) + self._encapsulation.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """Return the X25519 secret with another client. Raises InvalidMessage as `primitives.agree` does."""
        return agree(self._exchange, public[:KEY_BYTES])

    def seal(self, public: bytes, text: bytes, info: bytes) -> bytes:
        """Return a text, sealed so that only a public key's owner can read it and only this key can have sealed it.

        The key is made of the X25519 secret of both, and of a new one that is encapsulated. So each call returns
        different bytes, which no seed can reproduce. `info`: what the key is bound to, besides the context.
        """
        secret, ciphertext = _imported(public).encapsulate()
        key = derive(self.agree(public) + secret, self._context, info)
        return ciphertext + seal(key, text, info + ciphertext)

    def open(self, public: bytes, sealed: bytes, info: bytes) -> bytes:
        """Return what the owner of a public key sealed for this one.

        Raises InvalidMessage unless exactly this was sealed. Decapsulation itself reports nothing: a wrong ciphertext
        gives another secret (implicit rejection), with which the text does not open.
        """
        ciphertext, text = sealed[:CIPHERTEXT_BYTES], sealed[CIPHERTEXT_BYTES:]
        try:
            secret = self._encapsulation.decapsulate(ciphertext)
        except ValueError:
            raise InvalidMessage("the sealed message has the wrong size") from None
        return open_sealed(derive(self.agree(public) + secret, self._context, info), text, info + ciphertext)


def require_usable(public: bytes) -> None:
    """Raise InvalidMessage if no key can be agreed on with a public key of the right size."""
    agree(random_secret(), public[:KEY_BYTES])
    _imported(public)


def _imported(public: bytes) -> MLKEM768PublicKey:
    try:
        return MLKEM768PublicKey.from_public_bytes(public[KEY_BYTES:])
    except ValueError:
        raise InvalidMessage("the ML-KEM-768 public key is not one: send a new key") from None
