"""The keys of the masks of a client and its neighbours. All derive from one secret, whose shares the neighbours hold.

The first client of a pair, in name order, chooses a pair secret and seals it for the second one. The mask's key is made
from this secret and the X25519 secret of both. The secret of either client gives the key: that of the first gives the
pair secret, that of the second opens the message. It opens nothing else: shares are sealed for another key of their
receiver, which is never given back.
"""

import hashlib

from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.hybrid_keys import SEALING_BYTES, HybridKey
from fedssl.secure_aggregation.primitives import KEY_BYTES, derive, label
from fedssl.secure_aggregation.roster import CheckedRoster

PAIR_BYTES = SEALING_BYTES + 2 * KEY_BYTES
"""A pair secret, sealed, and the commitment to it."""


class MaskKeys:
    """The keys of one client that derive from its mask secret, 32 bytes."""

    def __init__(self, context: bytes, client: str, secret: bytes) -> None:
        self._context, self._client, self._secret = context, client, secret
        self._key = HybridKey(context, secret)

    @property
    def public(self) -> bytes:
        """The public key that the client announces."""
        return self._key.public

    def seal_for(self, roster: CheckedRoster, second: str) -> bytes:
        """Return the pair secret with a client that is later in name order, sealed for it, and the commitment to it."""
        secret = self._chosen(second)
        sealed = self._key.seal(roster.keys[second].mask_key, secret, _sealing(roster, self._client, second))
        return sealed + _commitment(self._context, self._client, second, secret)

    def pair_key(self, roster: CheckedRoster, other: str, message: bytes) -> bytes:
        """Return the AES key of the mask that this client shares with another.

        `message`: what the first of the two sealed for the second. Raises InvalidMessage if that one is at fault: the
        message cannot be opened, or the pair secret is not the one that it committed to.
        """
        first, second = sorted((self._client, other))
        public, sealed = roster.keys[other].mask_key, message[:-KEY_BYTES]
        try:
            if self._client == first:
                secret = self._chosen(second)
            else:
                secret = self._key.open(public, sealed, _sealing(roster, first, second))
        except InvalidMessage:
            raise InvalidMessage(f"{first} sealed a pair secret for {second} that {second} cannot open") from None
        if _commitment(self._context, first, second, secret) != message[-KEY_BYTES:]:
            raise InvalidMessage(f"{first} sealed another pair secret for {second} than it committed to")
        return derive(self._key.agree(public) + secret, self._context, label("pair", first, second))

    def _chosen(self, second: str) -> bytes:
        return derive(self._secret, self._context, label("pair secret", self._client, second))


def _sealing(roster: CheckedRoster, first: str, second: str) -> bytes:
    return roster.sealing_label("pair secret", first, second)


def _commitment(context: bytes, first: str, second: str, secret: bytes) -> bytes:
    """Return the commitment to a pair secret. It is as random as a key, so the hash hides it."""
    return hashlib.sha256(label("pair secret", first, second, "") + context + secret).digest()
