"""The messages of a secure round, in the order of its phases, and what is signed and committed to in them."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fedssl.secure_aggregation.hybrid_keys import PUBLIC_KEY_BYTES, SEALING_BYTES
from fedssl.secure_aggregation.masks import Words
from fedssl.secure_aggregation.primitives import KEY_BYTES, label
from fedssl.secure_aggregation.shamir import SHARE_BYTES

SIGNATURE_BYTES = 64
BOX_BYTES = SEALING_BYTES + 2 * SHARE_BYTES
DIGEST_BYTES = 32

SecretKind = Literal["mask", "self"]
"""mask: the secret of the pairwise masks' keys, given back if the client is lost. self: the secret of the client's own
mask, given back if its vector is in the sum. No client gives both of one owner."""


@dataclass(frozen=True, slots=True)
class KeyAnnouncement:
    """Phase 1, client to all: its keys of this round.

    encryption_key, mask_key: public keys (`HybridKey`), for sealed shares and for pairwise masks. commitment: to the
    secret of its own mask. signature: Ed25519 by its identity key, of `signed_bytes`.
    """

    client: str
    encryption_key: bytes
    mask_key: bytes
    commitment: bytes
    signature: bytes

    def signed_bytes(self, context: bytes) -> bytes:
        """Return what the identity key signs."""
        return label("keys", self.client, "") + context + self.encryption_key + self.mask_key + self.commitment

    def public_keys(self) -> tuple[bytes, ...]:
        """Return its X25519 and ML-KEM public keys: no two may be the same in a round."""
        both = (self.encryption_key, self.mask_key)
        return tuple(part for key in both for part in (key[:KEY_BYTES], key[KEY_BYTES:]))

    def is_well_formed(self) -> bool:
        """Return whether every part has its size."""
        sizes = tuple(map(len, (self.encryption_key, self.mask_key, self.commitment, self.signature)))
        return sizes == (PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES, DIGEST_BYTES, SIGNATURE_BYTES)


Roster = tuple[KeyAnnouncement, ...]
"""The clients that take part, in name order: those that announced their keys in time."""


def roster_digest(context: bytes, roster: Iterable[KeyAnnouncement]) -> bytes:
    """Return the hash of all keys: the public seed of the graph, and part of what is sealed."""
    hashed = hashlib.sha256(label("roster") + context)
    for keys in roster:
        hashed.update(keys.signed_bytes(context))
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class ShareCommitments:
    """Hashes of the two shares that one holder receives from one owner, by `share_commitment`."""

    mask: bytes
    self: bytes


@dataclass(frozen=True, slots=True)
class SealedShares:
    """Phase 2, client to each neighbour through the coordinator: a share of both secrets, sealed for that neighbour.

    boxes: by neighbour. pairs: by neighbour that is later in name order, the pair secret that is sealed for it
    (`MaskKeys.seal_for`). commitments: by holder, the neighbours and the client itself.
    """

    client: str
    boxes: Mapping[str, bytes]
    pairs: Mapping[str, bytes]
    commitments: Mapping[str, ShareCommitments]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A neighbour's message for one client, as the coordinator delivers it after phase 2. pair: None if the neighbour
    is later in name order, and so received the pair secret itself."""

    sender: str
    box: bytes
    pair: bytes | None
    commitments: ShareCommitments


@dataclass(frozen=True, slots=True)
class Inbox:
    """Answer to phase 2, coordinator to each client that sent shares.

    sharers: all clients that sent shares, in name order, the same list for everyone. deliveries: of those among them
    that are neighbours.
    """

    sharers: tuple[str, ...]
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedVector:
    """Phase 3, client to coordinator: its words plus masks. The first word counts clients: it is 1 unmasked.

    signature: Ed25519 by its identity key, of the sharers that it was shown (`sharers_statement`).
    """

    client: str
    words: Words
    signature: bytes

    def digest(self) -> bytes:
        """Return SHA-256 of the masked words."""
        return hashlib.sha256(self.words.tobytes()).digest()


@dataclass(frozen=True, slots=True)
class Survivors:
    """Answer to phase 3, coordinator to each survivor: all survivors in name order, each with its signature of the
    sharers.
    """

    clients: tuple[str, ...]
    signatures: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Phase 4, survivor to all: its Ed25519 signature of the list of survivors (`survivors_statement`)."""

    client: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Reveals:
    """Phase 5, client to coordinator: one share per owner, of its own mask if it survived, otherwise of its mask key.

    unusable: neighbours whose sealed shares this client could not open, so that it has none of theirs.
    """

    client: str
    self_shares: Mapping[str, bytes]
    mask_shares: Mapping[str, bytes]
    unusable: tuple[str, ...] = ()


def secret_commitment(context: bytes, secret: bytes) -> bytes:
    """Return the commitment to the secret of a client's own mask. The secret is random, so the hash hides it."""
    return hashlib.sha256(label("b", "") + context + secret).digest()


def share_commitment(context: bytes, kind: SecretKind, owner: str, holder: str, share: bytes) -> bytes:
    """Return the commitment to one share: the coordinator can name the sender of a wrong one.

    Fewer shares than the threshold are uniformly random, so the hash hides them.
    """
    return hashlib.sha256(label("share", kind, owner, holder, "") + context + share).digest()
