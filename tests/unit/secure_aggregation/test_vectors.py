"""The design's test vectors, which were computed by another program: keys, masks, shares, commitment, graph, words.

They are of version 1 of the protocol, whose name was in each derived key. `vectors_2.json` has what version 2 derives:
it was computed by kyber-py 1.2.0 (ML-KEM), PyCryptodome 4.4.0 (AES), and HKDF and X25519 in plain Python, with the
encapsulated message 05 x 32 and the nonce 06 x 12.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.aggregation.fixed_point import fixed_point_words
from fedssl.protocol.ledger import canonical
from fedssl.secure_aggregation import primitives
from fedssl.secure_aggregation.graph import neighbours
from fedssl.secure_aggregation.mask_keys import MaskKeys
from fedssl.secure_aggregation.masks import Mask, apply_masks
from fedssl.secure_aggregation.messages import KeyAnnouncement, secret_commitment
from fedssl.secure_aggregation.primitives import agree, derive, label, public_key
from fedssl.secure_aggregation.roster import CheckedRoster, self_mask_key
from fedssl.secure_aggregation.shamir import combine, split

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_bytes())
VECTORS_2 = json.loads((Path(__file__).parent / "vectors_2.json").read_bytes())
CONTEXT = bytes.fromhex(VECTORS["context"])
ONE, TWO, THREE, FOUR = (bytes([number]) * 32 for number in (1, 2, 3, 4))


def _mask(key: bytes, count: int) -> list[str]:
    words = np.zeros(count // 2, np.uint64)
    apply_masks(words, [Mask(key)])
    return [f"{word:08x}" for word in words.astype("<u8").view("<u4")]  # the vectors have words of 32 bits


def test_context_and_public_keys() -> None:
    assert hashlib.sha256(b"fedssl test context").digest() == CONTEXT
    assert public_key(ONE).hex() == VECTORS["pk_01"]
    assert public_key(TWO).hex() == VECTORS["pk_02"]


@pytest.fixture
def version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "_DOMAIN", "fedssl/secagg/1|")


@pytest.mark.usefixtures("version_1")
def test_mask_of_a_pair_from_its_x25519_secret() -> None:
    key = derive(agree(ONE, public_key(TWO)), CONTEXT, label("pair", "c001", "c002"))
    assert key.hex() == VECTORS["pair_key"]
    assert _mask(key, 8) == VECTORS["pair_mask_words"]


@pytest.mark.usefixtures("version_1")
def test_own_mask_and_its_commitment() -> None:
    key = self_mask_key(CONTEXT, THREE, "c001")
    assert key.hex() == VECTORS["self_key"]
    assert _mask(key, 4) == VECTORS["self_mask_words"]
    assert secret_commitment(CONTEXT, THREE).hex() == VECTORS["commit"]


def test_both_clients_derive_the_mask_of_the_pair_in_version_2() -> None:
    first, second = MaskKeys(CONTEXT, "c001", ONE), MaskKeys(CONTEXT, "c002", TWO)
    public = {"c001": first.public, "c002": second.public}
    for name, key in public.items():
        assert hashlib.sha256(key).hexdigest() == VECTORS_2[f"public_{name[-2:]}_sha256"]
    keys = {name: KeyAnnouncement(name, b"", key, b"", b"") for name, key in public.items()}
    roster = CheckedRoster(CONTEXT, bytes.fromhex(VECTORS_2["roster"]), keys, {})
    message = bytes.fromhex(VECTORS_2["pair_message"])
    assert first.pair_key(roster, "c002", message).hex() == VECTORS_2["pair_key"]
    assert second.pair_key(roster, "c001", message).hex() == VECTORS_2["pair_key"]
    assert _mask(bytes.fromhex(VECTORS_2["pair_key"]), 8) == VECTORS_2["pair_mask_words"]
    own = first.seal_for(roster, "c002")
    assert second.pair_key(roster, "c001", own).hex() == VECTORS_2["pair_key"]
    assert len(own) == len(message)
    assert own[-32:] == message[-32:]  # the commitment: the rest is random


def test_own_mask_and_its_commitment_in_version_2() -> None:
    assert self_mask_key(CONTEXT, THREE, "c001").hex() == VECTORS_2["self_key"]
    assert secret_commitment(CONTEXT, THREE).hex() == VECTORS_2["commit"]


def test_shares() -> None:
    expected = VECTORS["shamir"]
    assert bytes.fromhex(expected["secret"]) == FOUR
    shares = split(FOUR, expected["n"], expected["coefficients"])
    assert [share.hex() for share in shares] == expected["shares"]
    assert combine({point: shares[point - 1] for point in (5, 1, 3)}) == FOUR


def test_graph() -> None:
    graph = neighbours(CONTEXT, VECTORS["graph"], 4)
    assert {client: list(others) for client, others in graph.items()} == VECTORS["graph"]


def test_words_of_the_public_scale() -> None:
    # The vector's scale, 2^(bits - 1 - exponent - log2_cap) = 2^16, as fraction bits; the first four words are counts.
    expected = VECTORS["encoding"]
    bits = expected["bits"] - 1 - expected["exponent"] - expected["log2_cap"]
    delta = torch.tensor([float(number) for number in expected["delta"]], dtype=torch.float32)
    words = fixed_point_words("w", delta, None, expected["n"], fraction_bits=bits, num_clients=expected["clients"])
    assert words.numpy().astype(np.uint32).tolist() == expected["words"][4:]


def test_head_of_a_ledger() -> None:
    hashed = hashlib.sha256(b"fedssl/ledger/1\n" + bytes(32) + canonical(VECTORS["ledger"]["body"]))
    assert hashed.hexdigest() == VECTORS["ledger"]["hash"]
