"""The parts of a secure round that compute: the number of words, and the next weights from the unmasked sum."""

from collections.abc import Mapping
from dataclasses import astuple
from uuid import UUID

import numpy as np
import torch

from fedssl.aggregation.fixed_point import TotalBits
from fedssl.artifacts.tensors import Tensors
from fedssl.engine.narrow_words import bits_of_round
from fedssl.engine.secure_sums import num_client_words
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import VECTOR_NAME
from fedssl.secure_aggregation import UnmaskedSum
from fedssl_coordinator.aggregator.stored import stored_tensors
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.rounds.steps import NextVector
from fedssl_coordinator.federation.secure_rounds import service


def next_vector(run_id: UUID) -> NextVector:
    """Return the size of each client's masked vector in the run's next round. Raises the errors of `stored_tensors`."""
    with transaction() as session:
        run = run_rows.get_one(session, run_id)
    spec, number = RunSpec.model_validate(run.spec), run.rounds_closed + 1
    bits = total_bits(run, spec, number)
    ctx = Context(spec=spec, round_number=number, total_bits=bits)
    return NextVector(num_client_words(METHODS[spec.method.name], ctx), None if bits is None else astuple(bits))


def total_bits(run: Run, spec: RunSpec, number: int) -> TotalBits | None:
    """Return what all clients know about the total weight of a round, or None if all of its words have 64 bits.

    Most runs have no words of 32 bits, and then nothing is read. Raises the errors of `stored_tensors`.
    """
    if spec.aggregation.matrix_bits == 64 or run.server_state is None:
        return None
    with transaction() as session:
        if not rounds.gave_weights(session, run.id, number - 1):
            return None
    state = stored_tensors(run.server_state, f"server state after round {number - 1}")
    return bits_of_round(spec, state, follows_weights=True)


def unmasked_sum(round_id: UUID, digests: Mapping[str, str]) -> UnmaskedSum:
    """Return the sum of the words of a round's survivors.

    `digests`: of their masked vectors, by client. Raises NoSum, and the errors of `stored_tensors`.
    """
    with transaction() as session:
        context, server = service.restored(session, round_id)
    total = np.zeros(1 + context.num_words, np.uint64)
    for client in sorted(server.collected.vectors):
        total += _masked(client, digests[client])
    return server.finish(total)


def sent_apart(spec: RunSpec, digests: Mapping[str, str]) -> dict[str, Tensors]:
    """Return the tensors that left next to the masked vectors without masks, by client. Nothing if the method has none.

    `digests`: as in `unmasked_sum`. Raises the errors of `stored_tensors`.
    """
    plan = METHODS[spec.method.name].bind(spec).plan
    names = [each.name for each in spec.sent_apart(plan)]
    found: dict[str, Tensors] = {}
    for client, digest in digests.items() if names else ():
        tensors = stored_tensors(digest, f"masked vector of {client}")
        found[client] = {name: tensors[name].clone() for name in names}  # a view would keep the whole vector in memory
    return found


def _masked(client: str, digest: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    tensors: Tensors = stored_tensors(digest, f"masked vector of {client}")
    words: np.ndarray[tuple[int], np.dtype[np.uint64]] = tensors[VECTOR_NAME].numpy().view(np.uint64)
    return words


def as_tensor(found: UnmaskedSum) -> torch.Tensor:
    """Return the words of a sum, int64 (N,)."""
    return torch.from_numpy(found.words.view(np.int64))
