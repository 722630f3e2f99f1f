"""Keys of low order, modified sealed messages and signatures of other keys are refused."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.primitives import (
    agree,
    derive,
    is_signed_by,
    open_sealed,
    random_secret,
    seal,
)

P = 2**255 - 19
LOW_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    P - 1,
    P,
    P + 1,
]
"""The u-coordinates of Curve25519 whose order divides 8 (https://cr.yp.to/ecdh.html, "Do I need to validate?")."""


@pytest.mark.parametrize("coordinate", LOW_ORDER)
def test_a_public_key_of_low_order_is_refused(coordinate: int) -> None:
    with pytest.raises(InvalidMessage, match="low order"):
        agree(random_secret(), coordinate.to_bytes(32, "little"))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_public_key_of_the_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidMessage, match="wrong size"):
        agree(random_secret(), bytes([9]) * size)


def test_key_derivation_follows_rfc_5869() -> None:
    # Appendix A.1: the first 32 of its 42 bytes.
    context, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive(bytes([0x0B]) * 22, context, info).hex() == expected


def test_a_sealed_message_opens_only_with_its_key_and_associated_data() -> None:
    key = random_secret()
    sealed = seal(key, b"text", b"data")
    assert open_sealed(key, sealed, b"data") == b"text"
    changed = bytes([sealed[-1] ^ 1])
    for wrong in ((key, sealed, b"other"), (random_secret(), sealed, b"data"), (key, sealed[:-1] + changed, b"data")):
        with pytest.raises(InvalidMessage, match="was changed"):
            open_sealed(*wrong)
    for length in range(len(sealed)):
        with pytest.raises(InvalidMessage):
            open_sealed(key, sealed[:length], b"data")


def test_the_same_text_is_never_sealed_to_the_same_bytes() -> None:
    key = random_secret()
    assert len({seal(key, b"text", b"") for _ in range(100)}) == 100


def test_a_signature_is_valid_for_one_key_and_one_message() -> None:
    key = Ed25519PrivateKey.generate()
    identity, signature = key.public_key().public_bytes_raw(), key.sign(b"message")
    assert is_signed_by(identity, signature, b"message")
    assert not is_signed_by(identity, signature, b"another")
    assert not is_signed_by(Ed25519PrivateKey.generate().public_key().public_bytes_raw(), signature, b"message")
    assert not is_signed_by(identity, signature[:-1], b"message")
    assert not is_signed_by(b"short", signature, b"message")
