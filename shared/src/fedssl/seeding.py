"""Where every random number comes from: a seed derived from (run seed, round, client, purpose).

Nothing else may seed a generator. It is what makes simulation and deployment draw the same numbers, and a round that
is trained again after a crash repeat itself. Standard library only: the API process samples cohorts with it.
"""

import hashlib
from collections.abc import Iterable

from fedssl.protocol.training import CohortConfig


def derive_seed(run_seed: int, round_number: int, client_id: str, purpose: str) -> int:
    """A seed below 2**63 that differs wherever any of its four parts does.

    `round_number` 0 is the time before the first round; `client_id` "" is the coordinator.

    >>> derive_seed(0, 1, "hospital-a", "views") == derive_seed(0, 1, "hospital-a", "views")
    True
    >>> derive_seed(0, 1, "hospital-a", "views") == derive_seed(0, 1, "hospital-b", "views")
    False
    """
    message = f"fedssl/seed/1\n{run_seed}\n{round_number}\n{client_id}\n{purpose}".encode()
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "big") >> 1


def sample_cohort(client_ids: Iterable[str], cohort: CohortConfig, run_seed: int, round_number: int) -> list[str]:
    """The clients of one round, in name order: `cohort.fraction` of them, rounded half up, and at least one.

    Every client draws a number, and those with the smallest take part: no library's way of sampling, which another
    version might change, is in it. An over-sampled cohort (`asked_cohort`) is these and others.

    >>> sample_cohort(["b", "a"], CohortConfig(), 0, 1)
    ['a', 'b']
    """
    candidates = _drawn(client_ids, run_seed, round_number)
    return sorted(candidates[: cohort.num_wanted(len(candidates))])


def asked_cohort(client_ids: Iterable[str], cohort: CohortConfig, run_seed: int, round_number: int) -> list[str]:
    """The clients that a round is offered to, in name order: more than it needs where `cohort.over_sampling` says so.

    >>> asked_cohort("abcd", CohortConfig(fraction=0.5, over_sampling=1.5), 0, 1)
    ['a', 'b', 'd']
    """
    candidates = _drawn(client_ids, run_seed, round_number)
    return sorted(candidates[: cohort.num_asked(len(candidates))])


def _drawn(client_ids: Iterable[str], run_seed: int, round_number: int) -> list[str]:
    candidates = sorted(set(client_ids))
    candidates.sort(key=lambda client_id: derive_seed(run_seed, round_number, client_id, "cohort"))
    return candidates
