"""A client's side of one secure round: keys, shares, one masked vector, one answer to one list of survivors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import InvalidMessage, PhaseClosed, Refused
from fedssl.secure_aggregation.graph import is_connected
from fedssl.secure_aggregation.masks import Words, apply_mask
from fedssl.secure_aggregation.messages import (
    Delivery,
    KeyAnnouncement,
    MaskedVector,
    Reveals,
    Roster,
    SealedShares,
    ShareCommitments,
    secret_commitment,
    share_commitment,
)
from fedssl.secure_aggregation.primitives import open_sealed, public_key, random_secret, seal
from fedssl.secure_aggregation.roster import (
    CheckedRoster,
    check_keys,
    check_roster,
    pair_mask_key,
    sealing_key,
    self_mask_key,
)
from fedssl.secure_aggregation.shamir import SHARE_BYTES, random_coefficients, split


class Signer(Protocol):
    """An Ed25519 private key, such as that of `cryptography`."""

    def sign(self, data: bytes, /) -> bytes:
        """Return the signature, 64 bytes."""
        ...


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """A data owner's demands. `pins`: identity keys by client; None accepts every identity in the cohort."""

    min_cohort: int = 3
    collusion: int = 0
    pins: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Secrets:
    encryption: bytes
    mask: bytes
    own: bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """The shares of one owner that this client holds."""

    mask: bytes
    own: bytes


class SecureClient:
    """One client in one round. Each phase takes what the coordinator sent and returns what the client sends.

    A phase called again with the same input returns the same message, made once. With another input it raises Refused:
    two vectors under one mask would give their difference, and two lists of survivors both secrets of a client.

    Args:
        context: computed by the worker itself. client, identity: its name and its Ed25519 key. limits: its owner's.

    Raises Refused if the context does not respect the limits or does not have this client.
    """

    def __init__(self, context: RoundContext, client: str, identity: Signer, limits: OwnerLimits) -> None:
        _check_limits(context, client, limits)
        self._context, self._client = context, client
        self._digest = context.digest
        self._secrets = _Secrets(random_secret(), random_secret(), random_secret())
        self._roster: CheckedRoster | None = None
        self._shares: SealedShares | None = None
        self._held: dict[str, _Held] = {}
        self._inbox: dict[str, Delivery] | None = None
        self._unusable: tuple[str, ...] = ()
        self._vector: MaskedVector | None = None
        self._input: Words | None = None
        self._answered: tuple[tuple[str, ...], Reveals] | None = None
        self.announcement = self._announce(identity)
        """The keys, to be sent first."""

    def _announce(self, identity: Signer) -> KeyAnnouncement:
        secrets = self._secrets
        unsigned = KeyAnnouncement(
            self._client,
            public_key(secrets.encryption),
            public_key(secrets.mask),
            secret_commitment(self._digest, secrets.own),
            b"",
        )
        signature = identity.sign(unsigned.signed_bytes(self._digest))
        announcement = replace(unsigned, signature=signature)
        try:
            check_keys(self._context, announcement)
        except InvalidMessage:
            raise Refused(f"the cohort has another identity key of {self._client} than this worker's") from None
        return announcement

    def share(self, roster: Roster) -> SealedShares:
        """Return sealed shares of both secrets for each neighbour.

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
        self._roster, self._shares = checked, self._split(checked)
        return self._shares

    def _split(self, roster: CheckedRoster) -> SealedShares:
        holders, threshold = roster.holders(self._client), self._context.thresholds.threshold
        secrets = (self._secrets.mask, self._secrets.own)
        mask, own = (split(secret, len(holders), random_coefficients(threshold)) for secret in secrets)
        boxes, commitments = {}, {}
        for holder, share, own_share in zip(holders, mask, own, strict=True):
            commitments[holder] = self._commitments(self._client, holder, _Held(share, own_share))
            if holder == self._client:
                self._held[holder] = _Held(share, own_share)
                continue
            key = sealing_key(
                self._digest, self._secrets.encryption, roster.keys[holder].encryption_key, self._client, holder
            )
            boxes[holder] = seal(key, share + own_share, roster.sealing_label(self._client, holder))
        return SealedShares(self._client, boxes, commitments)

    def _commitments(self, owner: str, holder: str, held: _Held) -> ShareCommitments:
        return ShareCommitments(
            share_commitment(self._digest, "mask", owner, holder, held.mask),
            share_commitment(self._digest, "self", owner, holder, held.own),
        )

    def mask(self, inbox: Sequence[Delivery], words: Words) -> MaskedVector:
        """Return the words plus the client's own mask and those that it shares with the senders of the inbox.

        A sealed share that cannot be opened, or is not what its sender committed to, is left out and later reported in
        `Reveals.unusable`; the sum is right without it as long as enough others can be opened.

        Args:
            inbox: one delivery of each neighbour that sent shares.
            words: `num_words64` and `num_words32` of the context. They are not changed.

        Raises Refused if fewer than the threshold of holders have sent shares, a sender is not a neighbour or occurs
        twice, or another vector or inbox was masked before; ValueError if the words have other sizes.
        """
        roster = self._require_roster()
        senders = {delivery.sender: delivery for delivery in inbox}
        if len(senders) != len(inbox) or not set(senders) <= set(roster.graph[self._client]):
            raise Refused("the inbox must have at most one delivery of each neighbour")
        if words.sizes != (self._context.num_words64, self._context.num_words32):
            raise ValueError(f"the vector has {words.sizes} words, not as many as the context")
        if self._vector is not None and self._input is not None:
            same = np.array_equal(words.words64, self._input.words64)
            if senders != self._inbox or not same or not np.array_equal(words.words32, self._input.words32):
                raise Refused("another vector or inbox was already masked with the keys of this round")
            return self._vector
        if len(senders) + 1 < self._context.thresholds.threshold:
            raise Refused(f"only {len(senders)} neighbours sent shares: too few to mask a vector")
        self._open_all(roster, senders)
        self._inbox, self._input = senders, words.copy()
        self._vector = MaskedVector(self._client, self._masked(roster, words))
        return self._vector

    def _open_all(self, roster: CheckedRoster, senders: Mapping[str, Delivery]) -> None:
        unusable = []
        for sender, delivery in sorted(senders.items()):
            held = self._opened(roster, delivery)
            if held is None:
                unusable.append(sender)
            else:
                self._held[sender] = held
        self._unusable = tuple(unusable)

    def _opened(self, roster: CheckedRoster, delivery: Delivery) -> _Held | None:
        sender = delivery.sender
        key = sealing_key(
            self._digest, self._secrets.encryption, roster.keys[sender].encryption_key, sender, self._client
        )
        try:
            text = open_sealed(key, delivery.box, roster.sealing_label(sender, self._client))
        except InvalidMessage:
            return None
        held = _Held(text[:SHARE_BYTES], text[SHARE_BYTES:])
        return held if self._commitments(sender, self._client, held) == delivery.commitments else None

    def _masked(self, roster: CheckedRoster, words: Words) -> Words:
        total = Words(np.concatenate([np.ones(1, np.uint64), words.words64]), words.words32.copy())
        apply_mask(total, self_mask_key(self._digest, self._secrets.own, self._client))
        for other in self._inbox or ():
            public = roster.keys[other].mask_key
            key = pair_mask_key(self._digest, self._secrets.mask, public, self._client, other)
            apply_mask(total, key, is_negative=other < self._client)
        return total

    def reveal(self, survivors: Sequence[str]) -> Reveals:
        """Return one share per neighbour: of its own mask if it is among the survivors, otherwise of its mask key.

        Raises Refused if the list lacks this client, has clients that are not in the roster or clients twice, is
        smaller than the smallest sum, has fewer holders of this client's shares than the threshold, leaves the graph
        in parts, or differs from the list that was answered before.
        """
        roster, listed = self._require_roster(), tuple(survivors)
        if self._vector is None or self._inbox is None:
            raise PhaseClosed("this client has not sent a masked vector: it has nothing to reveal")
        if self._answered is not None:
            if self._answered[0] != listed:
                raise Refused("another list of survivors was already answered in this round")
            return self._answered[1]
        self._check_survivors(roster, listed)
        among = set(listed)
        own = {owner: held.own for owner, held in self._held.items() if owner in among}
        lost = {owner: held.mask for owner, held in self._held.items() if owner not in among}
        self._answered = listed, Reveals(self._client, own, lost, self._unusable)
        return self._answered[1]

    def _check_survivors(self, roster: CheckedRoster, listed: tuple[str, ...]) -> None:
        limits, among = self._context.thresholds, set(listed)
        if any(first >= second for first, second in pairwise(listed)) or not among <= set(roster.keys):
            raise Refused("the list of survivors must be in name order, with clients of the roster once each")
        if self._client not in among:
            raise Refused("the list of survivors lacks this client, whose vector was sent")
        if len(listed) < limits.min_survivors:
            raise Refused(f"{len(listed)} survivors are fewer than the {limits.min_survivors} that a sum must have")
        if unknown := among.intersection(roster.graph[self._client]) - set(self._inbox or ()):
            raise Refused(f"{min(unknown)} is listed as a survivor, but did not send shares")
        if len(among.intersection(roster.holders(self._client))) < limits.threshold:
            raise Refused("fewer neighbours survived than the threshold: there can be no sum")
        if not is_connected(roster.graph, among):
            raise Refused("the survivors are not connected: the sum of each part would be disclosed")

    def _require_roster(self) -> CheckedRoster:
        if self._roster is None:
            raise PhaseClosed("this client has not made shares yet")
        return self._roster


def _check_limits(context: RoundContext, client: str, limits: OwnerLimits) -> None:
    if context.identity_of(client) is None:
        raise Refused(f"{client} is not in the cohort of this round")
    if context.thresholds.min_survivors < limits.min_cohort:
        offered = context.thresholds.min_survivors
        raise Refused(f"the round sums {offered} updates or more, and the data owner demands {limits.min_cohort}")
    if context.thresholds.collusion < limits.collusion:
        offered = context.thresholds.collusion
        raise Refused(f"the round resists {offered} colluding clients, and the data owner demands {limits.collusion}")
    if limits.pins is None:
        return
    for member in context.cohort:
        if member.client != client and limits.pins.get(member.client) != member.identity:
            raise Refused(f"the identity key of {member.client} is not the pinned one: ask its owner for the new key")
