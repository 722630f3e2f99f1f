"""The setups of the explorations: small numbers that together cover everything a spec and the outside world can do."""

from fedssl.protocol.training import CohortConfig
from model.states import Setup

_ALL = CohortConfig(min_clients=2, max_attempts=2)
_OPERATORS = frozenset({"pauses", "declines", "failures"})
_REPAIRS = frozenset({"losses", "useless updates", "runs taken up", "final failures"})

SETUPS: dict[str, Setup] = {
    "two clients": Setup(2, 2, _ALL, events=_OPERATORS | _REPAIRS | {"revocations", "restarts"}),
    "two aggregators": Setup(2, 1, _ALL, num_aggregators=2, events=_REPAIRS | {"failures"}),
    "policies and late clients": Setup(
        2,
        1,
        CohortConfig(min_clients=1, max_attempts=2),
        num_unregistered=1,
        events=frozenset({"declines", "policies"}),
    ),
    "distilled rounds": Setup(2, 2, _ALL, distils_rounds=True, events=_OPERATORS | _REPAIRS | {"revocations"}),
    "distilled first weights": Setup(
        1, 1, CohortConfig(), distils_first=True, events=frozenset({"pauses", "failures", "final failures"})
    ),
    "a quorum, or the round is skipped": Setup(
        3,
        2,
        CohortConfig(min_clients=2, max_attempts=2, min_updates=2, without_quorum="skip"),
        events=frozenset({"declines", "revocations", "useless updates"}),
    ),
    "the first updates count": Setup(
        3,
        2,
        CohortConfig(min_clients=2, max_attempts=2, fraction=0.66, over_sampling=1.5),
        events=frozenset({"declines", "revocations"}),
    ),
    "sampled cohorts": Setup(
        3, 2, CohortConfig(min_clients=2, max_attempts=2, fraction=0.66), events=frozenset({"declines", "revocations"})
    ),
}
"""Setups for `make test`, with about ten thousand states each."""

_EVERYTHING = frozenset({"pauses", "declines", "failures", "revocations", "restarts"}) | _REPAIRS

LARGER: dict[str, Setup] = {
    "three clients": Setup(3, 2, CohortConfig(min_clients=2, max_attempts=3), events=_EVERYTHING),
    "two aggregators, everything": Setup(2, 2, _ALL, num_aggregators=2, events=_EVERYTHING),
    "policies, everything": Setup(
        2, 2, CohortConfig(min_clients=1, max_attempts=2), num_unregistered=1, events=_EVERYTHING | {"policies"}
    ),
    "three clients, distilled": Setup(
        3, 2, CohortConfig(min_clients=2, max_attempts=2), distils_first=True, distils_rounds=True, events=_EVERYTHING
    ),
    "two aggregators, a quorum": Setup(
        3,
        1,
        CohortConfig(min_clients=2, max_attempts=2, min_updates=2, without_quorum="skip"),
        num_aggregators=2,
        events=_EVERYTHING,
    ),
    "four clients, the first updates count": Setup(
        4,
        2,
        CohortConfig(min_clients=2, max_attempts=2, fraction=0.5, over_sampling=1.5, min_updates=1),
        events=frozenset({"declines", "revocations", "failures"}),
    ),
}
"""Setups for `make explore`, with several hundred thousand states each."""
