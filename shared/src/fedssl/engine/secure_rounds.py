"""One secure round in one process, through the protocol's own objects: every message, and clients lost in any phase.

Needs `cryptography` (`pip install 'fedssl[secure]'`).
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, get_args

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedssl.artifacts.tensors import Tensors, serialised
from fedssl.engine.aggregation import ServerResult
from fedssl.engine.secure_sums import (
    NoSecureSum,
    UnusableUpdate,
    client_words,
    num_client_words,
    run_secure_aggregation,
)
from fedssl.methods import Method
from fedssl.methods.api import Context, ServerState, Update
from fedssl.protocol.secure_work import SecureMember
from fedssl.secure_aggregation import (
    NoSum,
    OwnerLimits,
    RoundContext,
    SecureClient,
    SecureServer,
    UnmaskedSum,
)
from fedssl.secure_aggregation.round_context import round_context

Phase = Literal["keys", "shares", "vectors", "confirmations", "reveals"]
"""The messages of a client in a secure round, in this order."""

_PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class SecureResult:
    """A secure round with a sum. `survivors`: whose updates are in it. `rejected`: clients that kept their updates,
    because these could not be used."""

    result: ServerResult
    survivors: tuple[str, ...]
    rejected: tuple[str, ...]


def run_secure_round(
    method: Method,
    state: ServerState,
    broadcast: Tensors,
    updates: Sequence[Update],
    ctx: Context,
    *,
    lost: Mapping[str, Phase] | None = None,
) -> SecureResult:
    """Aggregate updates so that the coordinator's object only receives masked vectors.

    Keys and masks are random, and the sum is exact: the result has the bits of `run_aggregation` with the updates of
    the survivors.

    Args:
        method: of `ctx.spec`, which has `secure_aggregation`.
        state, broadcast: the coordinator's state, and what it sent to the clients.
        updates: of the round's whole cohort.
        ctx: of the coordinator in this round.
        lost: in which phase clients are lost. They have answered the phases before.

    Raises NoSecureSum if there is no sum, and ValueOutOfRange if a value does not fit in a round that has words of 32
    bits.
    """
    cohort = {update.client_id: update for update in updates}
    if unknown := sorted((lost or {}).keys() - cohort.keys()):
        raise ValueError(f"{unknown[0]} cannot be lost, because it is not in the cohort")
    identities = {name: Ed25519PrivateKey.generate() for name in cohort}
    public = {name: key.public_key().public_bytes_raw().hex() for name, key in identities.items()}
    members = [SecureMember(client=name, identity=key) for name, key in public.items()]
    context = _context(method, broadcast, members, ctx)
    protocol = _Protocol(context, identities, lost or {})
    try:
        found = protocol.sum(lambda name: client_words(method, broadcast, cohort[name], len(cohort), ctx))
    except NoSum as error:
        raise NoSecureSum(str(error), protocol.rejected) from error
    total = torch.from_numpy(found.words.view(np.int64))
    names = [each.name for each in ctx.spec.sent_apart(method.bind(ctx.spec).plan)]
    apart = {client: {name: cohort[client].load()[name] for name in names} for client in found.survivors}
    ctx = dataclasses.replace(ctx, restarting=[name for name in found.survivors if name in ctx.restarting])
    result = run_secure_aggregation(method, state, total, len(found.survivors), ctx, apart=apart)
    return SecureResult(result, found.survivors, tuple(protocol.rejected))


def _context(method: Method, broadcast: Tensors, members: Sequence[SecureMember], ctx: Context) -> RoundContext:
    """Return the context. Raises NoSecureSum if the cohort is too small for the spec."""
    try:
        return round_context(
            f"simulated-{secrets.token_hex(16)}",
            ctx.round_number,
            spec=ctx.spec,
            plan=method.bind(ctx.spec).plan,
            broadcast=hashlib.sha256(serialised(broadcast)).hexdigest(),
            frozen=None,
            num_words=num_client_words(method, ctx),
            cohort=members,
            total_bits=None if ctx.total_bits is None else astuple(ctx.total_bits),
        )
    except ValueError as error:
        raise NoSecureSum(f"the cohort has no secure sum: {error}") from error


class _Protocol:
    """The coordinator's object, and those of the clients. `rejected`: clients that kept their updates."""

    def __init__(
        self, context: RoundContext, identities: Mapping[str, Ed25519PrivateKey], lost: Mapping[str, Phase]
    ) -> None:
        self._context, self._identities, self._lost = context, identities, lost
        self._server = SecureServer(context)
        self.rejected: list[str] = []

    def sum(self, words_of: Callable[[str], Tensor]) -> UnmaskedSum:
        """Return the sum of the survivors' words. Raises NoSum, and what `words_of` raises except UnusableUpdate."""
        server, clients = self._server, self._announced()
        roster = server.freeze_keys()
        for name in self._present("shares"):
            server.add_shares(clients[name].share(roster))
        inboxes = server.freeze_shares()
        for name in self._present("vectors"):
            try:
                vector = words_of(name)
            except UnusableUpdate:
                self.rejected.append(name)
            else:
                words = vector.numpy().view(np.uint64)
                server.add_vector(clients[name].mask(inboxes[name], words))
        survivors = server.freeze_vectors()
        for name in self._present("confirmations"):
            server.add_confirmation(clients[name].confirm(survivors))
        confirmations = server.freeze_confirmations()
        for name in self._present("reveals"):
            server.add_reveals(clients[name].reveal(confirmations))
        return server.finish()

    def _announced(self) -> dict[str, SecureClient]:
        """Return the clients that sent keys. Each requires what the spec promises, and knows the others' identities."""
        thresholds, cohort = self._context.thresholds, self._context.cohort
        pins = {member.client: member.identity for member in cohort}
        limits = OwnerLimits(thresholds.min_survivors, thresholds.collusion, pins)
        clients = {
            name: SecureClient(self._context, name, self._identities[name], limits) for name in self._present("keys")
        }
        for client in clients.values():
            self._server.add_keys(client.announcement)
        return clients

    def _present(self, phase: Phase) -> list[str]:
        """Return the clients that send something in this phase, in name order."""
        gone = {name for name, last in self._lost.items() if _PHASES.index(last) <= _PHASES.index(phase)}
        return sorted(self._identities.keys() - gone.union(self.rejected))
