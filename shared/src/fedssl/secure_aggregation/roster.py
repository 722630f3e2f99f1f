"""The frozen list of clients with their keys, and what everyone derives from it."""

from dataclasses import dataclass
from itertools import pairwise

from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.graph import neighbours
from fedssl.secure_aggregation.hybrid_keys import require_usable
from fedssl.secure_aggregation.messages import KeyAnnouncement, Roster, roster_digest
from fedssl.secure_aggregation.primitives import derive, is_signed_by, label
from fedssl.secure_aggregation.thresholds import require_private


@dataclass(frozen=True, slots=True)
class CheckedRoster:
    """A roster whose keys are signed by their owners, with its graph. `digest`: of all keys."""

    context: bytes
    digest: bytes
    keys: dict[str, KeyAnnouncement]
    graph: dict[str, tuple[str, ...]]

    def holders(self, owner: str) -> list[str]:
        """Return who holds shares of a client, in the order of the points 1, 2, ... of its polynomials."""
        return sorted((owner, *self.graph[owner]))

    def sealing_label(self, kind: str, sender: str, recipient: str) -> bytes:
        """Return the label to which a message is bound that one client seals for another."""
        return label(kind, sender, recipient, "") + self.context + self.digest


def check_keys(context: RoundContext, keys: KeyAnnouncement) -> None:
    """Raise InvalidMessage unless a client of the cohort signed these keys for this round and they can be used."""
    identity = context.identity_of(keys.client)
    if identity is None:
        raise InvalidMessage(f"{keys.client} is not in the cohort of this round")
    if not keys.is_well_formed():
        raise InvalidMessage(f"the keys of {keys.client} have the wrong size")
    if not is_signed_by(identity, keys.signature, keys.signed_bytes(context.digest)):
        raise InvalidMessage(f"{keys.client} did not sign these keys for this round with the identity in the cohort")
    for key in (keys.encryption_key, keys.mask_key):
        try:
            require_usable(key)
        except InvalidMessage as error:
            raise InvalidMessage(f"{keys.client}: {error}") from None


def check_roster(context: RoundContext, roster: Roster) -> CheckedRoster:
    """Return the roster with its graph. Raises InvalidMessage if a key in it is wrong, or too few clients are in it."""
    for keys in roster:
        check_keys(context, keys)
    if any(first.client >= second.client for first, second in pairwise(roster)):
        raise InvalidMessage("the roster must be in name order, with each client once")
    used = [key for keys in roster for key in keys.public_keys()]
    if len(set(used)) != len(used) or len({keys.commitment for keys in roster}) != len(roster):
        raise InvalidMessage("two clients of the roster have the same key or commitment")
    try:
        require_private(context.thresholds, len(roster))
    except ValueError as error:
        raise InvalidMessage(f"the roster is too small: {error}") from None
    return with_graph(context, roster)


def with_graph(context: RoundContext, roster: Roster) -> CheckedRoster:
    """Return a roster that was checked before, with its graph."""
    digest = roster_digest(context.digest, roster)
    names = [keys.client for keys in roster]
    graph = neighbours(digest, names, context.thresholds.degree)
    return CheckedRoster(context.digest, digest, {keys.client: keys for keys in roster}, graph)


def self_mask_key(context: bytes, secret: bytes, client: str) -> bytes:
    """Return the AES key of a client's own mask."""
    return derive(secret, context, label("self", client))
