"""A coordinator that sends each client of a secure round whatever it wants, and computes everything that it then
can.

It has colluding clients: their secrets, their identity keys, and the shares that were sealed for them.
"""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations
from typing import TypeVar

import numpy as np

from fedssl.secure_aggregation import PhaseClosed, Refused, Words
from fedssl.secure_aggregation.agreement import sharers_statement, survivors_statement
from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.mask_keys import PAIR_BYTES, MaskKeys
from fedssl.secure_aggregation.masks import Mask, apply_masks
from fedssl.secure_aggregation.messages import (
    BOX_BYTES,
    Confirmation,
    Delivery,
    Inbox,
    MaskedVector,
    Reveals,
    Roster,
    SealedShares,
    SecretKind,
    ShareCommitments,
    Survivors,
    secret_commitment,
)
from fedssl.secure_aggregation.roster import CheckedRoster, check_roster, self_mask_key
from fedssl.secure_aggregation.shamir import SHARE_BYTES, combine
from support.secure_rounds import SecureRound

Message = TypeVar("Message")


class LyingCoordinator:
    """A round of `secure` with the clients of `colluding`. Each step returns a client's answer, or None if it
    refuses."""

    def __init__(self, secure: SecureRound, colluding: Iterable[str] = ()) -> None:
        self.secure, self.colluding = secure, frozenset(colluding)
        self.clients = {name: secure.client(name) for name in secure.names}
        self.refused: dict[str, str] = {}
        self._rosters: dict[str, CheckedRoster] = {}
        self._shares: dict[str, SealedShares] = {}
        self._vectors: dict[str, tuple[MaskedVector, Inbox]] = {}
        self._reveals: dict[str, Reveals] = {}

    @property
    def honest(self) -> list[str]:
        """The clients that do not collude."""
        return [name for name in self.secure.names if name not in self.colluding]

    def roster(self, names: Iterable[str]) -> Roster:
        """Return the keys that these clients announced."""
        return tuple(self.clients[name].announcement for name in sorted(names))

    def _ask(self, name: str, step: Callable[[], Message]) -> Message | None:
        try:
            return step()
        except (Refused, PhaseClosed) as error:
            self.refused.setdefault(name, str(error))
            return None

    def share(self, name: str, roster: Roster) -> SealedShares | None:
        """Show a client a roster."""
        shares = self._ask(name, lambda: self.clients[name].share(roster))
        if shares is not None:
            self._shares[name], self._rosters[name] = shares, check_roster(self.secure.context, roster)
        return shares

    def inbox(self, name: str, sharers: Iterable[str]) -> Inbox:
        """Return an inbox from these clients. Those that sent nothing for this client have an invented message."""
        listed = tuple(sorted(sharers))
        neighbours = self._rosters[name].graph[name] if name in self._rosters else ()
        return Inbox(listed, tuple(self._delivery(other, name) for other in listed if other in neighbours))

    def _delivery(self, sender: str, recipient: str) -> Delivery:
        sent = self._shares.get(sender)
        if sent is None or recipient not in sent.boxes:
            pair = bytes(PAIR_BYTES) if sender < recipient else None
            return Delivery(sender, bytes(BOX_BYTES), pair, ShareCommitments(bytes(32), bytes(32)))
        return Delivery(sender, sent.boxes[recipient], sent.pairs.get(recipient), sent.commitments[recipient])

    def mask(self, name: str, sharers: Iterable[str]) -> MaskedVector | None:
        """Show a client any list of clients that sent shares."""
        inbox = self.inbox(name, sharers)
        vector = self._ask(name, lambda: self.clients[name].mask(inbox, self.secure.words[name]))
        if vector is not None:
            self._vectors[name] = vector, inbox
        return vector

    def confirm(self, name: str, survivors: Iterable[str]) -> Confirmation | None:
        """Show a client a list of survivors. Colluding clients sign whatever it expects of them."""
        listed = tuple(sorted(survivors))
        signatures = {other: vector.signature for other, (vector, _) in self._vectors.items()}
        if name in self._vectors:
            roster, sharers = self._rosters[name], self._vectors[name][1].sharers
            for other in self.colluding.intersection(listed):
                signatures[other] = self.secure.identities[other].sign(sharers_statement(roster, other, sharers))
        return self._ask(name, lambda: self.clients[name].confirm(Survivors(listed, signatures)))

    def collude(self, name: str, survivors: Iterable[str]) -> list[Confirmation]:
        """Return the colluding clients' confirmations of a list that was shown to this client."""
        listed, sharers = tuple(sorted(survivors)), self._vectors[name][1].sharers
        return [
            Confirmation(
                other,
                self.secure.identities[other].sign(survivors_statement(self._rosters[name], other, sharers, listed)),
            )
            for other in sorted(self.colluding.intersection(listed))
        ]

    def reveal(self, name: str, confirmations: Iterable[Confirmation]) -> Reveals | None:
        """Ask a client for its shares."""
        listed = tuple(confirmations)
        reveals = self._ask(name, lambda: self.clients[name].reveal(listed))
        if reveals is not None:
            self._reveals[name] = reveals
        return reveals

    def disclosed(self) -> dict[frozenset[str], Words]:
        """Return every sum of honest clients' vectors that can be computed, keyed by those clients."""
        secret = cache(self._secret)
        senders = sorted(name for name in self._vectors if name not in self.colluding)
        found = {}
        for size in range(1, len(senders) + 1):
            for chosen in combinations(senders, size):
                words = self._unmasked(frozenset(chosen), secret)
                if words is not None:
                    found[frozenset(chosen)] = words
        return found

    def _unmasked(self, chosen: frozenset[str], secret: Callable[[str, SecretKind], bytes | None]) -> Words | None:
        context = self.secure.context
        total = np.zeros(context.num_words + 1, np.uint64)
        for name in sorted(chosen):
            vector, inbox = self._vectors[name]
            total += vector.words
            own = secret(name, "self")
            if own is None:
                return None
            apply_masks(total, [Mask(self_mask_key(context.digest, own, name), is_negative=True)])
            for other in (delivery.sender for delivery in inbox.deliveries):
                if other in chosen and any(it.sender == name for it in self._vectors[other][1].deliveries):
                    continue  # the masks of these two cancel
                key = self._pair_key(secret, name, other)
                if key is None:
                    return None
                apply_masks(total, [Mask(key, is_negative=name < other)])
        return total[1:]

    def _secret(self, owner: str, kind: SecretKind) -> bytes | None:
        """Return a client's secret if it colludes or enough shares are known."""
        secrets = self.clients[owner]._secrets
        if owner in self.colluding:
            return secrets.mask if kind == "mask" else secrets.own
        if owner not in self._rosters:
            return None
        shares = {}
        for point, holder in enumerate(self._rosters[owner].holders(owner), start=1):
            share = self._share(owner, holder, kind)
            if share is not None:
                shares[point] = share
        threshold = self.secure.context.thresholds.threshold
        if len(shares) < threshold:
            return None
        found = combine(dict(list(shares.items())[:threshold]))
        announced = self.clients[owner].announcement
        if kind == "mask":
            assert MaskKeys(self.secure.context.digest, owner, found).public == announced.mask_key
        else:
            assert secret_commitment(self.secure.context.digest, found) == announced.commitment
        return found

    def _share(self, owner: str, holder: str, kind: SecretKind) -> bytes | None:
        if holder in self.colluding:
            text = self._opened(owner, holder)
            return None if text is None else text[:SHARE_BYTES] if kind == "mask" else text[SHARE_BYTES:]
        reveals = self._reveals.get(holder)
        if reveals is None:
            return None
        return (reveals.mask_shares if kind == "mask" else reveals.self_shares).get(owner)

    def _opened(self, owner: str, colluding: str) -> bytes | None:
        sent = self._shares.get(owner)
        if sent is None or colluding not in sent.boxes:
            return None
        private, public = self.clients[colluding]._secrets.encryption, self.clients[owner].announcement.encryption_key
        info = self._rosters[owner].sealing_label("shares", owner, colluding)
        try:
            return private.open(public, sent.boxes[colluding], info)
        except InvalidMessage:
            return None

    def _pair_key(self, secret: Callable[[str, SecretKind], bytes | None], one: str, other: str) -> bytes | None:
        """Return the key of the mask of two clients, if the mask secret of either is known."""
        first, second = sorted((one, other))
        sent = self._shares.get(first)
        if sent is None or second not in sent.pairs:
            return None
        for owner, peer in ((one, other), (other, one)):
            private = secret(owner, "mask")
            if private is not None:
                keys = MaskKeys(self.secure.context.digest, owner, private)
                try:
                    return keys.pair_key(self._rosters[first], peer, sent.pairs[second])
                except InvalidMessage:
                    pass
        return None
