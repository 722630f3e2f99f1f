"""Secure rounds without a network: a cohort with identities, and the messages of all phases, some of which are lost."""

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedssl.secure_aggregation import (
    Member,
    NoSum,
    OwnerLimits,
    RoundContext,
    SecureClient,
    SecureServer,
    Thresholds,
    UnmaskedSum,
    Words,
    choose_thresholds,
)
from fedssl.secure_aggregation.messages import Confirmation, Inbox, Reveals, Roster, SealedShares, Survivors
from fedssl.secure_aggregation.shamir import PRIME


def random_coefficients(threshold: int) -> list[int]:
    """Return the `threshold` - 1 random coefficients of a polynomial."""
    return [secrets.randbelow(PRIME) for _ in range(threshold - 1)]


NEVER = 5
"""A client answers the phases keys, shares, vectors, confirmations and reveals (0 to 4) before it is lost in one."""


class SecureRound:
    """A cohort c000, c001, ..., whose clients are lost in the phases of `lost_in` (`NEVER`: not at all)."""

    def __init__(self, num_clients: int, *, num_words: int = 4, limits: Thresholds | None = None) -> None:
        self.names = [f"c{number:03d}" for number in range(num_clients)]
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.names}
        members = tuple(Member(n, k.public_key().public_bytes_raw().hex()) for n, k in self.identities.items())
        self.context = RoundContext(
            run="run",
            round=3,
            broadcast=hashlib.sha256(b"broadcast").hexdigest(),
            plan=hashlib.sha256(b"plan").hexdigest(),
            num_words=num_words,
            thresholds=limits or choose_thresholds(num_clients),
            cohort=members,
        )
        self.clients: dict[str, SecureClient] = {}
        self.server = SecureServer(self.context)
        self.inboxes: dict[str, Inbox] = {}
        self.roster: Roster = ()
        rng = np.random.default_rng(num_clients)
        self.words = {name: rng.integers(0, 2**64, num_words, np.uint64) for name in self.names}
        self.lost_in = dict.fromkeys(self.names, NEVER)

    def client(self, name: str, context: RoundContext | None = None) -> SecureClient:
        """Return a new client with the identity of this name."""
        return SecureClient(context or self.context, name, self.identities[name], OwnerLimits())

    def at(self, phase: int) -> list[str]:
        """Return the clients that still answer in a phase."""
        return [name for name in self.names if self.lost_in[name] > phase]

    def announce(self) -> Roster:
        """Run the first phase."""
        for name in self.at(0):
            self.clients[name] = self.client(name)
            self.server.add_keys(self.clients[name].announcement)
        self.roster = self.server.freeze_keys()
        return self.roster

    def share(self, alter: Callable[[SealedShares], SealedShares] = lambda shares: shares) -> None:
        """Run the second phase, with each client's shares as `alter` returns them."""
        for name in self.at(1):
            self.server.add_shares(alter(self.clients[name].share(self.roster)))
        self.inboxes = self.server.freeze_shares()

    def mask(self) -> Survivors:
        """Run the third phase and return the survivors."""
        for name in self.at(2):
            self.server.add_vector(self.clients[name].mask(self.inboxes[name], self.words[name]))
        return self.server.freeze_vectors()

    def confirm(self, survivors: Survivors) -> tuple[Confirmation, ...]:
        """Run the fourth phase and return the confirmations."""
        for name in self.at(3):
            self.server.add_confirmation(self.clients[name].confirm(survivors))
        return self.server.freeze_confirmations()

    def reveal(self, confirmations: tuple[Confirmation, ...]) -> UnmaskedSum:
        """Run the last phase and return the sum."""
        for name in self.at(4):
            self.server.add_reveals(self.clients[name].reveal(confirmations))
        return self.server.finish()

    def until_survivors(self) -> Survivors:
        """Run the first three phases."""
        self.announce()
        self.share()
        return self.mask()

    def until_confirmations(self) -> tuple[Confirmation, ...]:
        """Run the first four phases."""
        return self.confirm(self.until_survivors())

    def outcome(self, lost_in: Mapping[str, int] | None = None) -> UnmaskedSum | NoSum:
        """Run all phases, and return the sum or the reason why there is none."""
        self.lost_in |= lost_in or {}
        try:
            return self.reveal(self.until_confirmations())
        except NoSum as error:
            return error

    def expected(self, survivors: tuple[str, ...]) -> Words:
        """Return the sum of these clients' words."""
        total = np.zeros_like(self.words[self.names[0]])
        for name in survivors:
            total += self.words[name]
        return total


def with_self_share(reveals: Reveals, owner: str, share: bytes) -> Reveals:
    """Return the reveals with another share of one owner's own mask."""
    return replace(reveals, self_shares={**reveals.self_shares, owner: share})
