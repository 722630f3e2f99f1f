"""Agreement on two lists, so that a coordinator cannot show different ones to different clients.

The threshold of shares does not prevent this. Each client gives one share of each other client, so no one obtains both
secrets of one client. But a coordinator that shows each client another list, in which u survived and some of the others
did not, obtains the own mask of u and the mask keys of everyone that shares a mask with u, and so the vector of u
(tests/property/test_lying_coordinator.py computes it). Therefore:

- With its vector, each client signs the list of the clients that sent shares. A vector is unmasked only together with
  vectors whose senders signed the same list, so every two of them that are connected share a mask.
- Each client signs one list of survivors. It reveals shares only after more than half of the cohort and the colluding
  clients, floor((K + c) / 2) + 1 of K, signed the same one: two lists would need more honest clients than there are.

Reference: Bonawitz et al. 2017, figure 4, round 3 (ConsistencyCheck).
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from fedssl.secure_aggregation.context import RoundContext
from fedssl.secure_aggregation.errors import InvalidMessage
from fedssl.secure_aggregation.graph import is_connected
from fedssl.secure_aggregation.messages import Confirmation
from fedssl.secure_aggregation.primitives import is_signed_by, label
from fedssl.secure_aggregation.roster import CheckedRoster


def sharers_statement(roster: CheckedRoster, client: str, sharers: Sequence[str]) -> bytes:
    """Return what a client signs about the clients that sent shares."""
    return label("sharers", client, "") + roster.context + roster.digest + _names_digest(sharers)


def survivors_statement(roster: CheckedRoster, client: str, sharers: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Return what a client signs about the clients whose vectors are in the sum."""
    lists = _names_digest(sharers) + _names_digest(survivors)
    return label("survivors", client, "") + roster.context + roster.digest + lists


def _names_digest(names: Sequence[str]) -> bytes:
    return hashlib.sha256("|".join(names).encode()).digest()  # no name contains a "|"


def check_list(context: RoundContext, roster: CheckedRoster, clients: Sequence[str], among: Collection[str]) -> None:
    """Raise InvalidMessage unless the vectors of these clients could be unmasked, and only all together.

    They are in name order and among `among`, as many as a sum must have, each with enough holders of its shares among
    them, and connected.
    """
    limits, present = context.thresholds, set(clients)
    if any(first >= second for first, second in pairwise(clients)):
        raise InvalidMessage("the list must be in name order, with each client once")
    if unknown := present.difference(among):
        raise InvalidMessage(f"{min(unknown)} is in the list, but was not in this phase")
    if len(present) < limits.min_survivors:
        raise InvalidMessage(f"{len(present)} clients are fewer than the {limits.min_survivors} that a sum must have")
    for client in clients:
        if len(present.intersection(roster.holders(client))) < limits.threshold:
            raise InvalidMessage(f"fewer than {limits.threshold} of the clients hold shares of {client}")
    if not is_connected(roster.graph, present):
        raise InvalidMessage("the clients are not connected: the sum of each part would be disclosed")


def check_sharers(
    context: RoundContext,
    roster: CheckedRoster,
    sharers: Sequence[str],
    survivors: Sequence[str],
    signatures: Mapping[str, bytes],
) -> None:
    """Raise InvalidMessage unless every survivor signed this list of the clients that sent shares."""
    for client in survivors:
        identity, signature = context.identity_of(client), signatures.get(client, b"")
        if identity is None or not is_signed_by(identity, signature, sharers_statement(roster, client, sharers)):
            raise InvalidMessage(f"{client} did not sign the same list of clients that sent shares")


def check_confirmation(
    context: RoundContext,
    roster: CheckedRoster,
    sharers: Sequence[str],
    survivors: Sequence[str],
    confirmation: Confirmation,
) -> None:
    """Raise InvalidMessage unless one of these survivors signed this list of them."""
    client, identity = confirmation.client, context.identity_of(confirmation.client)
    statement = survivors_statement(roster, client, sharers, survivors)
    if client not in survivors or identity is None or not is_signed_by(identity, confirmation.signature, statement):
        raise InvalidMessage(f"{client} is not a survivor that confirmed this list of survivors")
