"""Derives the seed of every random number from (run seed, round, client, purpose).

Nothing else may seed a generator. Therefore simulation and deployment draw the same numbers, and a round that is
trained again after a crash gives the same result. Only the standard library is used, because the API process samples
cohorts with it.
"""

import hashlib
from collections.abc import Iterable

from fedssl.protocol.training import CohortConfig


def derive_seed(run_seed: int, round_number: int, client_id: str, purpose: str) -> int:
    """Return a seed below 2**63 that differs if any of its four parts does.

    `round_number` 0 means before the first round; `client_id` "" means the coordinator.

    >>> derive_seed(0, 1, "hospital-a", "views") == derive_seed(0, 1, "hospital-a", "views")
    True
    >>> derive_seed(0, 1, "hospital-a", "views") == derive_seed(0, 1, "hospital-b", "views")
    False
    """
    message = f"fedssl/seed/1\n{run_seed}\n{round_number}\n{client_id}\n{purpose}".encode()
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "big") >> 1


def sample_cohort(client_ids: Iterable[str], cohort: CohortConfig, run_seed: int, round_number: int) -> list[str]:
    """Return the clients of one round, in name order: `cohort.fraction` of them, rounded half up, and at least one.

    A number is derived for every client, and the clients with the smallest numbers take part. No library's sampling is
    used, because another version might change it. An over-sampled cohort (`asked_cohort`) has these clients and others.

    >>> sample_cohort(["b", "a"], CohortConfig(), 0, 1)
    ['a', 'b']
    """
    candidates = _drawn(client_ids, run_seed, round_number)
    return sorted(candidates[: cohort.num_wanted(len(candidates))])


def asked_cohort(client_ids: Iterable[str], cohort: CohortConfig, run_seed: int, round_number: int) -> list[str]:
    """Return the clients that a round is offered to, in name order: with `cohort.over_sampling`, more than it needs.

    >>> asked_cohort("abcd", CohortConfig(fraction=0.5, over_sampling=1.5), 0, 1)
    ['b', 'c', 'd']
    """
    candidates = _drawn(client_ids, run_seed, round_number)
    return sorted(candidates[: cohort.num_asked(len(candidates))])


def _drawn(client_ids: Iterable[str], run_seed: int, round_number: int) -> list[str]:
    candidates = sorted(set(client_ids))
    candidates.sort(key=lambda client_id: derive_seed(run_seed, round_number, client_id, "cohort"))
    return candidates
