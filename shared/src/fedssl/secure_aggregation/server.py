"""The coordinator's side of one secure round: it collects and freezes each phase, and unmasks the sum."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from fedssl.secure_aggregation.agreement import check_confirmation, check_list, check_sharers
from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import Conflict, InvalidMessage, NoSum, PhaseClosed
from fedssl.secure_aggregation.mask_keys import PAIR_BYTES
from fedssl.secure_aggregation.masks import Words
from fedssl.secure_aggregation.messages import (
    BOX_BYTES,
    DIGEST_BYTES,
    Confirmation,
    Delivery,
    Inbox,
    KeyAnnouncement,
    MaskedVector,
    Reveals,
    Roster,
    SealedShares,
    SecretKind,
    Survivors,
    share_commitment,
)
from fedssl.secure_aggregation.roster import CheckedRoster, check_keys, check_roster, with_graph
from fedssl.secure_aggregation.shamir import SHARE_BYTES
from fedssl.secure_aggregation.unmasking import UnmaskedSum, removed_masks
from fedssl.wording import plural

Phase = Literal["keys", "shares", "vectors", "confirmations", "reveals", "done", "failed"]


@dataclass(slots=True)
class Collected:
    """The messages of a round that were accepted, by client. `vectors`: digests of the masked vectors; `signatures`:
    what was signed with them."""

    keys: dict[str, KeyAnnouncement] = field(default_factory=dict)
    shares: dict[str, SealedShares] = field(default_factory=dict)
    vectors: dict[str, bytes] = field(default_factory=dict)
    signatures: dict[str, bytes] = field(default_factory=dict)
    confirmations: dict[str, Confirmation] = field(default_factory=dict)
    reveals: dict[str, Reveals] = field(default_factory=dict)


class SecureServer:
    """One round. Messages are added one at a time; each `freeze_...` closes a phase and returns what to send next.

    A message that comes twice is accepted, one with other content raises Conflict, one for a phase that is over or has
    not begun PhaseClosed, and a wrong one InvalidMessage; none of these changes anything. `NoSum` ends the round.

    Masked vectors are added up as they arrive, so that the memory needed does not depend on the number of clients.
    """

    def __init__(self, context: RoundContext) -> None:
        self._context, self._digest = context, context.digest
        self.phase: Phase = "keys"
        self._collected = Collected()
        self._roster: CheckedRoster | None = None
        self._sharers: tuple[str, ...] = ()
        self._survivors: tuple[str, ...] = ()
        self._total = np.zeros(context.num_words + 1, np.uint64)

    @classmethod
    def restored(cls, context: RoundContext, phase: Phase, collected: Collected) -> Self:
        """Return the server of a round whose messages were all accepted before, and were stored since.

        Its sum is empty: `finish` needs that of the stored vectors.
        """
        server = cls(context)
        server.phase, server._collected = phase, collected
        if phase != "keys":
            server._roster = with_graph(context, tuple(keys for _, keys in sorted(collected.keys.items())))
        if phase not in ("keys", "shares"):
            server._sharers = tuple(sorted(collected.shares))
        if phase not in ("keys", "shares", "vectors"):
            server._survivors = tuple(sorted(collected.vectors))
        return server

    @property
    def collected(self) -> Collected:
        """The messages that were accepted."""
        return self._collected

    @property
    def roster_digest(self) -> bytes | None:
        """The digest of all keys, once they are complete."""
        return None if self._roster is None else self._roster.digest

    def add_keys(self, keys: KeyAnnouncement) -> None:
        """Add a client's keys."""
        if self._is_repeated(self._collected.keys.get(keys.client), keys):
            return
        self._require("keys")
        check_keys(self._context, keys)
        own = keys.public_keys()
        used = {key for other in self._collected.keys.values() for key in other.public_keys()}
        if len(set(own)) != len(own) or used.intersection(own):
            raise InvalidMessage(f"{keys.client} sent a key that is already in use: send new keys")
        self._collected.keys[keys.client] = keys

    def freeze_keys(self) -> Roster:
        """Return the roster, for all of its clients. Raises NoSum if too few clients sent keys."""
        self._require("keys")
        roster = tuple(keys for _, keys in sorted(self._collected.keys.items()))
        try:
            self._roster = check_roster(self._context, roster)
        except InvalidMessage as error:
            raise self._failed(f"{len(roster)} of {len(self._context.cohort)} clients sent keys: {error}") from None
        self.phase = "shares"
        return roster

    def add_shares(self, shares: SealedShares) -> None:
        """Add a client's sealed shares."""
        if self._is_repeated(self._collected.shares.get(shares.client), shares):
            return
        self._require("shares")
        roster = self._roster_with(shares.client)
        neighbours, holders = set(roster.graph[shares.client]), set(roster.holders(shares.client))
        if set(shares.boxes) != neighbours or set(shares.commitments) != holders:
            raise InvalidMessage(f"{shares.client} must send one sealed share to each of its neighbours")
        if set(shares.pairs) != {neighbour for neighbour in neighbours if neighbour > shares.client}:
            raise InvalidMessage(f"{shares.client} must send a pair secret to each neighbour after it in name order")
        digests = [digest for both in shares.commitments.values() for digest in (both.mask, both.self)]
        pairs, boxes = shares.pairs.values(), shares.boxes.values()
        sizes = [(boxes, BOX_BYTES), (pairs, PAIR_BYTES), (digests, DIGEST_BYTES)]
        if any(len(part) != size for parts, size in sizes for part in parts):
            raise InvalidMessage(f"the sealed shares of {shares.client} have the wrong size")
        self._collected.shares[shares.client] = shares

    def freeze_shares(self) -> dict[str, Inbox]:
        """Return each sender's inbox. Raises NoSum if too few clients sent shares."""
        self.end_shares()
        return {client: self.inbox(client) for client in self._sharers}

    def end_shares(self) -> None:
        """End the phase as `freeze_shares` does, without reading any of the shares."""
        self._require("shares")
        self._sharers = tuple(sorted(self._collected.shares))
        self._require_sum(self._sharers, self._frozen().keys, "sent shares")
        self.phase = "vectors"

    def inbox(self, client: str) -> Inbox:
        """Return the inbox of a client that sent shares, once these are complete."""
        return Inbox(self._sharers, self._deliveries(self._frozen(), client))

    def _deliveries(self, roster: CheckedRoster, client: str) -> tuple[Delivery, ...]:
        sent = self._collected.shares
        return tuple(
            Delivery(
                sender, sent[sender].boxes[client], sent[sender].pairs.get(client), sent[sender].commitments[client]
            )
            for sender in roster.graph[client]
            if sender in sent
        )

    def add_vector(self, vector: MaskedVector) -> None:
        """Add a client's masked vector to the sum. One that is late raises PhaseClosed; its own mask still hides it."""
        if vector.words.shape != self._total.shape:
            raise InvalidMessage(f"{vector.client} sent {vector.words.size} words, not {self._total.size}")
        if self.record_vector(vector.client, vector.digest(), vector.signature):
            self._total += vector.words

    def record_vector(self, client: str, digest: bytes, signature: bytes) -> bool:
        """Record a vector that the caller keeps and adds up, and return whether it is new."""
        known = self._collected.vectors.get(client)
        before = None if known is None else (known, self._collected.signatures[client])
        if self._is_repeated(before, (digest, signature)):
            return False
        self._require("vectors")
        if client not in self._sharers:
            raise InvalidMessage(f"{client} did not send shares, so its vector cannot be unmasked")
        check_sharers(self._context, self._frozen(), self._sharers, (client,), {client: signature})
        self._collected.vectors[client] = digest
        self._collected.signatures[client] = signature
        return True

    def freeze_vectors(self) -> Survivors:
        """Return the survivors, for each of them. Raises NoSum if there are too few."""
        self._require("vectors")
        self._survivors = tuple(sorted(self._collected.vectors))
        self._require_sum(self._survivors, self._sharers, "sent a vector")
        self.phase = "confirmations"
        return Survivors(self._survivors, dict(self._collected.signatures))

    def add_confirmation(self, confirmation: Confirmation) -> None:
        """Add a survivor's signature of the list of survivors."""
        if self._is_repeated(self._collected.confirmations.get(confirmation.client), confirmation):
            return
        self._require("confirmations")
        check_confirmation(self._context, self._frozen(), self._sharers, self._survivors, confirmation)
        self._collected.confirmations[confirmation.client] = confirmation

    def freeze_confirmations(self) -> tuple[Confirmation, ...]:
        """Return the confirmations, for each survivor. Raises NoSum if too few survivors confirmed the list."""
        self._require("confirmations")
        confirmations = tuple(it for _, it in sorted(self._collected.confirmations.items()))
        if len(confirmations) < self._context.quorum:
            raise self._failed(
                f"{len(confirmations)} of {len(self._survivors)} survivors confirmed their list, and "
                f"{self._context.quorum} must"
            )
        self.phase = "reveals"
        return confirmations

    def add_reveals(self, reveals: Reveals) -> None:
        """Add a survivor's shares. A share that differs from its commitment raises InvalidMessage with its sender."""
        if self._is_repeated(self._collected.reveals.get(reveals.client), reveals):
            return
        self._require("reveals")
        if reveals.client not in self._survivors:
            raise InvalidMessage(f"{reveals.client} is not among the survivors, and only survivors reveal shares")
        survived, held = set(self._survivors), self._held_by(reveals.client) - set(reveals.unusable)
        if set(reveals.self_shares) != held & survived or set(reveals.mask_shares) != held - survived:
            raise InvalidMessage(
                f"{reveals.client} must reveal a share of the own mask of each survivor, and of the mask key of each "
                "lost client, among its neighbours and itself"
            )
        self._check_shares("self", reveals.client, reveals.self_shares.items())
        self._check_shares("mask", reveals.client, reveals.mask_shares.items())
        self._collected.reveals[reveals.client] = reveals

    def _held_by(self, holder: str) -> set[str]:
        return set(self._frozen().holders(holder)).intersection(self._sharers)

    def _check_shares(self, kind: SecretKind, holder: str, shares: Iterable[tuple[str, bytes]]) -> None:
        for owner, share in shares:
            both = self._collected.shares[owner].commitments[holder]
            promised = both.mask if kind == "mask" else both.self
            is_promised = share_commitment(self._digest, kind, owner, holder, share) == promised
            if len(share) != SHARE_BYTES or not is_promised:
                raise InvalidMessage(f"{holder} sent a wrong share of {owner}")

    def finish(self, total: Words | None = None) -> UnmaskedSum:
        """Return the sum of the survivors' words.

        `total`: the sum of the survivors' masked vectors, if the caller has added them up.

        Raises NoSum if fewer shares of a needed secret were revealed than the threshold (the phase stays open for
        more), if a client shared a secret other than it committed to, or sealed a pair secret that its neighbour cannot
        open, or if the masks do not cancel.
        """
        self._require("reveals")
        if (few := self._too_few()) is not None:
            have = len(self._collected.reveals)
            raise NoSum(
                f"{have} of {len(self._survivors)} survivors revealed shares, and fewer than "
                f"{self._context.thresholds.threshold} have one of {few}"
            )
        needed = {owner: self._revealed_of(owner) for owner in self._needed()}
        masked = self._total if total is None else total
        try:
            sent = self._collected.shares
            result = removed_masks(self._context, self._frozen(), masked, self._survivors, sent, needed)
        except NoSum:
            self.phase = "failed"
            raise
        self.phase = "done"
        return result

    @property
    def is_complete(self) -> bool:
        """True if enough shares were revealed to remove all masks."""
        return self.phase == "reveals" and self._too_few() is None

    def num_revealed(self) -> Counter[str]:
        """Return the number of revealed shares of each client's secret. It reads none of the shares."""
        sharers, counts = set(self._sharers), Counter[str]()
        for holder, reveals in self._collected.reveals.items():
            counts.update(sharers.intersection(self._frozen().holders(holder)).difference(reveals.unusable))
        return counts

    def _needed(self) -> list[str]:
        """Return the clients whose secrets are needed."""
        graph, survivors = self._frozen().graph, set(self._survivors)
        # A lost client without a surviving neighbour shares a mask with none of the survivors.
        return [owner for owner in self._sharers if owner in survivors or survivors.intersection(graph[owner])]

    def _too_few(self) -> str | None:
        """Return a client with fewer revealed shares of its secret than the threshold."""
        counts, threshold = self.num_revealed(), self._context.thresholds.threshold
        return next((owner for owner in self._needed() if counts[owner] < threshold), None)

    def _revealed_of(self, owner: str) -> dict[int, bytes]:
        """Return the revealed shares of one client's needed secret, by their points; no more than the threshold."""
        shares: dict[int, bytes] = {}
        for point, holder in enumerate(self._frozen().holders(owner), start=1):
            reveals = self._collected.reveals.get(holder)
            given = None if reveals is None else reveals.self_shares.get(owner, reveals.mask_shares.get(owner))
            if given is not None and len(shares) < self._context.thresholds.threshold:
                shares[point] = given
        return shares

    def _require_sum(self, clients: Sequence[str], among: Collection[str], did: str) -> None:
        try:
            check_list(self._context, self._frozen(), clients, among)
        except InvalidMessage as error:
            raise self._failed(f"{plural(len(clients), 'client')} {did}: {error}") from None

    def _frozen(self) -> CheckedRoster:
        if self._roster is None:
            raise PhaseClosed("the keys of this round are not complete")
        return self._roster

    def _roster_with(self, client: str) -> CheckedRoster:
        roster = self._frozen()
        if client not in roster.keys:
            raise InvalidMessage(f"{client} did not send keys in time and is not in this round")
        return roster

    def _require(self, phase: Phase) -> None:
        if self.phase != phase:
            raise PhaseClosed(f"this belongs to the phase {phase}, and the round is in the phase {self.phase}")

    def _failed(self, reason: str) -> NoSum:
        self.phase = "failed"
        return NoSum(reason)

    @staticmethod
    def _is_repeated(before: object, message: object) -> bool:
        if before is None:
            return False
        if before != message:
            raise Conflict("another message of this client for this phase was already accepted")
        return True
