"""A client's side of one secure round: keys, shares, one masked vector, and one answer to one list of survivors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedssl.secure_aggregation.agreement import (
    check_confirmation,
    check_list,
    check_sharers,
    sharers_statement,
    survivors_statement,
)
from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import InvalidMessage, PhaseClosed, Refused
from fedssl.secure_aggregation.hybrid_keys import HybridKey
from fedssl.secure_aggregation.limits import OwnerLimits, check_limits
from fedssl.secure_aggregation.mask_keys import MaskKeys
from fedssl.secure_aggregation.masks import Mask, Words, apply_masks
from fedssl.secure_aggregation.messages import (
    Confirmation,
    Delivery,
    Inbox,
    KeyAnnouncement,
    MaskedVector,
    Reveals,
    Roster,
    SealedShares,
    ShareCommitments,
    Survivors,
    secret_commitment,
    share_commitment,
)
from fedssl.secure_aggregation.primitives import derive, label, random_secret
from fedssl.secure_aggregation.roster import (
    CheckedRoster,
    check_keys,
    check_roster,
    self_mask_key,
)
from fedssl.secure_aggregation.shamir import SHARE_BYTES, split
from fedssl.wording import plural


class Signer(Protocol):
    """An Ed25519 private key, such as that of `cryptography`."""

    def sign(self, data: bytes, /) -> bytes:
        """Return the signature, 64 bytes."""
        ...


@dataclass(frozen=True, slots=True)
class _Secrets:
    encryption: HybridKey
    mask: bytes
    own: bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """The shares of one owner that this client holds."""

    mask: bytes
    own: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Masked:
    """The words that were masked, with the masks of one inbox, and the result."""

    inbox: Inbox
    words: Words
    vector: MaskedVector


class SecureClient:
    """One client in one round. Each phase takes what the coordinator sent and returns what the client sends.

    A phase that is called again with the same input returns the same message, which is made only once. With another
    input it raises Refused: two vectors under one mask would give their difference, and two lists of survivors the
    masks of one client.

    Everything random derives from `seed`, except in sealed messages: encapsulation draws its own random numbers. A
    client that is rebuilt from the same seed, and then gets the same inputs and the shares that it made before, returns
    the same messages. So a worker that stores the seed, and each input and the shares before it sends the answer, can
    continue after it was killed. A worker that has sent keys and lost the seed must decline the round: another client
    would mask the same update again, and the difference of two sums could be one update.

    Args:
        context: computed by the worker itself. client, identity: its name and its Ed25519 key. limits: its owner's.
        seed: 32 random bytes for this round only, or None to make them.

    Raises Refused if the context does not respect the limits or does not have this client.
    """

    def __init__(
        self, context: RoundContext, client: str, identity: Signer, limits: OwnerLimits, seed: bytes | None = None
    ) -> None:
        check_limits(context, client, limits)
        self._context, self._client, self._identity = context, client, identity
        self._digest = context.digest
        self._seed = random_secret() if seed is None else seed
        encryption, mask, own = (self._random("secret", name) for name in ("encryption", "mask", "self"))
        self._secrets = _Secrets(HybridKey(self._digest, encryption), mask, own)
        self._mask_keys = MaskKeys(self._digest, client, mask)
        self._roster: CheckedRoster | None = None
        self._shares: SealedShares | None = None
        self._held: dict[str, _Held] = {}
        self._unusable: tuple[str, ...] = ()
        self._masked: _Masked | None = None
        self._confirmed: tuple[tuple[str, ...], Confirmation] | None = None
        self._reveals: Reveals | None = None
        self.announcement = self._announce()
        """The keys, to be sent first."""

    def _random(self, *purpose: str, of: bytes = b"") -> bytes:
        """Return 32 bytes for one purpose, which only this client in this round knows."""
        return derive(self._seed, self._digest, label(*purpose, "") + of)

    def _announce(self) -> KeyAnnouncement:
        secrets = self._secrets
        unsigned = KeyAnnouncement(
            self._client,
            secrets.encryption.public,
            self._mask_keys.public,
            secret_commitment(self._digest, secrets.own),
            b"",
        )
        signature = self._identity.sign(unsigned.signed_bytes(self._digest))
        announcement = replace(unsigned, signature=signature)
        try:
            check_keys(self._context, announcement)
        except InvalidMessage:
            raise Refused(f"the cohort has another identity key of {self._client} than this worker's") from None
        return announcement

    @property
    def roster_digest(self) -> bytes | None:
        """The digest of the keys for which shares were made: with whom a sum is made. None before the shares."""
        return None if self._roster is None else self._roster.digest

    def share(self, roster: Roster, before: SealedShares | None = None) -> SealedShares:
        """Return sealed shares of both secrets for each neighbour, and the pair secrets for those after this client.

        `before`: what a client with the same seed returned for this roster, which is then returned again.

        Raises Refused if the roster has a key that its owner did not sign for this round, lacks this client's own, is
        too small, or differs from the one answered before.
        """
        try:
            checked = check_roster(self._context, roster)
        except InvalidMessage as error:
            raise Refused(f"the roster is wrong: {error}") from None
        if checked.keys.get(self._client) != self.announcement:
            raise Refused("the roster does not have the keys that this client announced")
        if self._shares is not None and self._roster is not None:
            if checked.digest != self._roster.digest:
                raise Refused("shares were already made for another roster of this round")
            return self._shares
        self._roster, self._shares = checked, self._split(checked, before)
        return self._shares

    def _split(self, roster: CheckedRoster, before: SealedShares | None) -> SealedShares:
        holders, threshold = roster.holders(self._client), self._context.thresholds.threshold
        secrets = {"mask": self._secrets.mask, "self": self._secrets.own}
        mask, own = (
            split(secret, len(holders), self._coefficients(kind, threshold, roster)) for kind, secret in secrets.items()
        )
        held = {holder: _Held(*both) for holder, *both in zip(holders, mask, own, strict=True)}
        self._held[self._client] = held[self._client]
        return before or SealedShares(
            self._client,
            {holder: self._sealed(roster, holder, held[holder]) for holder in roster.graph[self._client]},
            {
                second: self._mask_keys.seal_for(roster, second)
                for second in roster.graph[self._client]
                if second > self._client
            },
            {holder: self._commitments(self._client, holder, each) for holder, each in held.items()},
        )

    def _sealed(self, roster: CheckedRoster, holder: str, held: _Held) -> bytes:
        public, info = roster.keys[holder].encryption_key, roster.sealing_label("shares", self._client, holder)
        return self._secrets.encryption.seal(public, held.mask + held.own, info)

    def _coefficients(self, kind: str, threshold: int, roster: CheckedRoster) -> list[int]:
        """Return the coefficients of a secret's polynomial: 256 random bits each, of a field with 297 more elements."""
        powers = range(1, threshold)
        return [int.from_bytes(self._random("coefficient", kind, str(power), of=roster.digest)) for power in powers]

    def _commitments(self, owner: str, holder: str, held: _Held) -> ShareCommitments:
        return ShareCommitments(
            share_commitment(self._digest, "mask", owner, holder, held.mask),
            share_commitment(self._digest, "self", owner, holder, held.own),
        )

    def mask(self, inbox: Inbox, words: Words) -> MaskedVector:
        """Return the words plus the client's own mask and those that it shares with the senders of the inbox.

        A sealed share that cannot be opened, or is not what its sender committed to, is left out and later reported in
        `Reveals.unusable`; the sum is right without it as long as enough others can be opened. Without a pair secret
        there can be no sum of both clients. So this client refuses: it counts as lost, its mask secret is given back,
        and the coordinator sees what this client saw, and names the sender (`removed_masks`).

        Args:
            inbox: who sent shares, and one delivery of each neighbour among them.
            words: as many as the context's `num_words`. They are not changed.

        Raises Refused if the clients that sent shares could not be summed up, the deliveries are not those of the
        neighbours among them, a pair secret cannot be opened, or another vector or inbox was masked before; ValueError
        if they are not as many words of 64 bits.
        """
        roster = self._require_roster()
        if words.dtype != np.uint64 or words.shape != (self._context.num_words,):
            raise ValueError(
                f"{words.dtype}{words.shape} is not the context's {self._context.num_words} words of 64 bits"
            )
        if self._masked is not None:
            if inbox != self._masked.inbox or not np.array_equal(words, self._masked.words):
                raise Refused("another vector or inbox was already masked with the keys of this round")
            return self._masked.vector
        self._check_inbox(roster, inbox)
        self._open_all(roster, inbox.deliveries)
        signature = self._identity.sign(sharers_statement(roster, self._client, inbox.sharers))
        vector = MaskedVector(self._client, self._with_masks(roster, inbox, words), signature)
        self._masked = _Masked(inbox, words.copy(), vector)
        return vector

    def _check_inbox(self, roster: CheckedRoster, inbox: Inbox) -> None:
        if self._client not in inbox.sharers:
            raise Refused("the list of clients that sent shares lacks this client")
        try:
            check_list(self._context, roster, inbox.sharers, roster.keys)
        except InvalidMessage as error:
            raise Refused(f"the list of clients that sent shares is wrong: {error}") from None
        expected = set(inbox.sharers).intersection(roster.graph[self._client])
        if sorted(delivery.sender for delivery in inbox.deliveries) != sorted(expected):
            raise Refused("the inbox must have one delivery of each neighbour that sent shares")

    def _open_all(self, roster: CheckedRoster, deliveries: Sequence[Delivery]) -> None:
        opened = {delivery.sender: self._opened(roster, delivery) for delivery in deliveries}
        self._held |= {sender: held for sender, held in opened.items() if held is not None}
        self._unusable = tuple(sorted(sender for sender, held in opened.items() if held is None))

    def _opened(self, roster: CheckedRoster, delivery: Delivery) -> _Held | None:
        sender = delivery.sender
        public, info = roster.keys[sender].encryption_key, roster.sealing_label("shares", sender, self._client)
        try:
            text = self._secrets.encryption.open(public, delivery.box, info)
        except InvalidMessage:
            return None
        held = _Held(text[:SHARE_BYTES], text[SHARE_BYTES:])
        return held if self._commitments(sender, self._client, held) == delivery.commitments else None

    def _with_masks(self, roster: CheckedRoster, inbox: Inbox, words: Words) -> Words:
        pair_keys = self._pair_keys(roster, inbox)
        total = np.concatenate([np.ones(1, np.uint64), words])
        masks = [Mask(self_mask_key(self._digest, self._secrets.own, self._client))]
        masks += [Mask(key, is_negative=other < self._client) for other, key in pair_keys.items()]
        apply_masks(total, masks)
        return total

    def _pair_keys(self, roster: CheckedRoster, inbox: Inbox) -> dict[str, bytes]:
        """Return the keys of the masks that are shared with the senders. Raises Refused if one has no such key."""
        sent, keys = self._shares.pairs if self._shares else {}, dict[str, bytes]()
        for delivery in inbox.deliveries:
            other = delivery.sender
            message = sent[other] if other > self._client else delivery.pair or b""
            try:
                keys[other] = self._mask_keys.pair_key(roster, other, message)
            except InvalidMessage as error:
                raise Refused(str(error)) from None
        return keys

    def confirm(self, survivors: Survivors) -> Confirmation:
        """Return this client's signature of the list of survivors. It signs one list per round.

        Raises Refused if the list lacks this client, has clients that did not send shares or that signed another list
        of those that did, could not be summed up, or differs from the list that was confirmed before.
        """
        roster, masked, clients = self._require_roster(), self._require_masked(), survivors.clients
        if self._confirmed is not None:
            if self._confirmed[0] != clients:
                raise Refused("another list of survivors was already confirmed in this round")
            return self._confirmed[1]
        if self._client not in clients:
            raise Refused("the list of survivors lacks this client, whose vector was sent")
        sharers = masked.inbox.sharers
        try:
            check_list(self._context, roster, clients, sharers)
            check_sharers(self._context, roster, sharers, clients, survivors.signatures)
        except InvalidMessage as error:
            raise Refused(f"the list of survivors is wrong: {error}") from None
        signature = self._identity.sign(survivors_statement(roster, self._client, sharers, clients))
        self._confirmed = clients, Confirmation(self._client, signature)
        return self._confirmed[1]

    def reveal(self, confirmations: Sequence[Confirmation]) -> Reveals:
        """Return one share per neighbour: of its own mask if it is among the survivors, otherwise of its mask key.

        Raises Refused unless `RoundContext.quorum` different survivors confirmed the list that this client confirmed.
        """
        roster, masked = self._require_roster(), self._require_masked()
        if self._confirmed is None:
            raise PhaseClosed("this client has not confirmed a list of survivors: it has nothing to reveal")
        if self._reveals is not None:
            return self._reveals
        clients, _ = self._confirmed
        for confirmation in confirmations:
            try:
                check_confirmation(self._context, roster, masked.inbox.sharers, clients, confirmation)
            except InvalidMessage as error:
                raise Refused(f"a confirmation is wrong: {error}") from None
        confirmed, needed = len({confirmation.client for confirmation in confirmations}), self._context.quorum
        if confirmed < needed:
            raise Refused(f"{plural(confirmed, 'client')} confirmed this list of survivors, and {needed} must")
        among = set(clients)
        own = {owner: held.own for owner, held in self._held.items() if owner in among}
        lost = {owner: held.mask for owner, held in self._held.items() if owner not in among}
        self._reveals = Reveals(self._client, own, lost, self._unusable)
        return self._reveals

    def _require_roster(self) -> CheckedRoster:
        if self._roster is None:
            raise PhaseClosed("this client has not made shares yet")
        return self._roster

    def _require_masked(self) -> _Masked:
        if self._masked is None:
            raise PhaseClosed("this client has not sent a masked vector yet")
        return self._masked
