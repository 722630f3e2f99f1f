"""The number of a client's neighbours, and of shares that recover a secret, so that a round is private and survives.

Notation: K clients, degree k, n = k + 1 holders of each client's shares (itself and its neighbours), t shares that
give back a secret, c clients that collude with the coordinator, d clients that are lost.
"""

from dataclasses import dataclass
from functools import cache
from math import comb, inf, log2

LARGEST_COMPLETE = 128
"""Up to this number of clients, everyone is connected with everyone: this excludes what a sparser graph only makes
improbable, and costs at most 1 s of masks per client."""

SMALLEST_COHORT = 3
"""With two clients, each obtains the other's update by subtracting its own from the sum."""

LOG2_PRIVACY = -40.0
LOG2_ABORT = -20.0


def share_threshold(num_holders: int, collusion: int) -> int:
    """Return t = floor((n + c) / 2) + 1, the smallest t with 2 t > n + c.

    Each of the n - c honest holders gives one share of a client: of its mask key or of its own mask's secret. A
    coordinator that shows different lists of survivors, and has both shares of the c others, has at most n + c shares,
    and needs 2 t for both secrets.

    >>> [share_threshold(n, n // 4) for n in (5, 10, 20, 100)]
    [4, 7, 13, 63]

    Reference: Bonawitz et al. 2017, section 6.2, threshold against an active server; per neighbourhood as in Bell et
    al. 2020, section 4.
    """
    if not 0 <= collusion <= num_holders - 2:
        raise ValueError(f"of {num_holders} clients, 0 to {num_holders - 2} can collude, not {collusion}")
    return (num_holders + collusion) // 2 + 1


@cache
def _log2_tail(population: int, marked: int, drawn: int, least: int) -> float:
    """Return log2 P[X >= least], X hypergeometric: the marked ones among those drawn without replacement."""
    counts = range(max(least, 0, drawn - (population - marked)), min(drawn, marked) + 1)
    ways = sum(comb(marked, x) * comb(population - marked, drawn - x) for x in counts)
    return log2(ways) - log2(comb(population, drawn)) if ways else -inf


def log2_split_view(num_clients: int, degree: int, threshold: int, collusion: int) -> float:
    """Return log2 of a bound on the probability that both secrets of any client can be obtained by different lists.

    K P[X >= 2 t - n], X ~ Hypergeometric(K - 1, c, k): the colluding clients in one neighbourhood.

    Reference: Bell et al. 2020, section 3, the union bound over neighbourhoods with too many corrupt clients.
    """
    return log2(num_clients) + _log2_tail(num_clients - 1, collusion, degree, 2 * threshold - degree - 1)


def log2_abort(num_clients: int, degree: int, threshold: int, dropped: int) -> float:
    """Return log2 of a bound on the probability that fewer than t holders of a secret that is needed survive.

    d P[X >= k - t + 1] + (K - d) P[Y >= k - t + 2], with X and Y the lost clients among the k neighbours of a client
    that is lost itself, and of one that is not: Hypergeometric(K - 1, d - 1, k) and Hypergeometric(K - 1, d, k).

    Reference: Bell et al. 2020, section 3, the union bound over neighbourhoods with too few survivors.
    """
    others = num_clients - 1
    lost = log2(dropped) + _log2_tail(others, dropped - 1, degree, degree - threshold + 1) if dropped else -inf
    alive = log2(num_clients - dropped) + _log2_tail(others, dropped, degree, degree - threshold + 2)
    return log2(2.0**lost + 2.0**alive) if max(lost, alive) > -1000 else -inf


def log2_parted(num_clients: int, degree: int, threshold: int, collusion: int) -> float:
    """Return log2 of a bound on the probability that the survivors' graph without the colluding ones is not connected.

    K P[X >= t - k / 2 - 1], X ~ Hypergeometric(K - 1, c, k / 2). If it is not connected, some honest survivor is
    followed on the ring by k / 2 clients that collude or are lost. At least t - 1 of its k neighbours survived, so at
    most k - t + 1 of the k / 2 are lost and the others collude. The coordinator may choose the lost clients. The sum of
    each part would be disclosed.

    Reference: Bell et al. 2020, section 3, connectivity of Harary graphs; there, clients are lost by chance.
    """
    half = degree // 2
    return log2(num_clients) + _log2_tail(num_clients - 1, collusion, half, threshold - half - 1)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Numbers that determine a round's graph and shares. `min_survivors`: the smallest number of updates in a sum."""

    degree: int
    threshold: int
    collusion: int
    min_survivors: int


def choose_thresholds(
    num_clients: int, *, min_cohort: int = SMALLEST_COHORT, collusion: int | None = None
) -> Thresholds:
    """Return degree, threshold and smallest sum for a cohort.

    Up to 128 clients the graph is complete and t = floor((K + c) / 2) + 1: the guarantee is unconditional and K - t
    clients may be lost. Above, the smallest even degree is chosen for which some t keeps the split view and a graph in
    parts below 2^-40 and the abort below 2^-20; a complete graph if there is none. These bounds hold if no one
    chooses keys, or leaves clients out, to change the order of the ring.

    The number of clients that may be lost, d, is a tenth of the cohort.

    Args:
        num_clients: K, at least 3.
        min_cohort: the smallest number of updates that may be summed, at least 3 and at most K.
        collusion: c, clients that may collude with the coordinator. Default: a quarter of at most 128 clients, or a
            tenth of more.

    Raises ValueError if a number does not fit the others.
    """
    if num_clients < SMALLEST_COHORT:
        raise ValueError(f"secure aggregation needs at least {SMALLEST_COHORT} clients, not {num_clients}")
    if not SMALLEST_COHORT <= min_cohort <= num_clients:
        raise ValueError(
            f"min_cohort must be between {SMALLEST_COHORT} and the cohort's {num_clients} clients, not {min_cohort}"
        )
    if collusion is None:
        collusion = num_clients // 4 if num_clients <= LARGEST_COMPLETE else num_clients // 10
    dropped = num_clients // 10
    if collusion < 0 or collusion + dropped > num_clients - 2:
        raise ValueError(f"{collusion} colluding and {dropped} lost clients leave fewer than 2 of {num_clients}")
    degree, threshold = num_clients - 1, share_threshold(num_clients, collusion)
    if num_clients > LARGEST_COMPLETE:
        degree, threshold = _sparse(num_clients, collusion, dropped) or (degree, threshold)
    return Thresholds(degree, threshold, collusion, max(min_cohort, smallest_sum(collusion)))


def require_private(limits: Thresholds, num_clients: int) -> None:
    """Raise ValueError if these limits do not keep a client's two secrets apart among this number of clients.

    Everyone connected with everyone: 2 t > K + c. Otherwise the bounds on the split view and on a graph in parts must
    be at most 2^-40.
    """
    degree, threshold, collusion = min(limits.degree, num_clients - 1), limits.threshold, limits.collusion
    if limits.min_survivors < max(SMALLEST_COHORT, smallest_sum(collusion)):
        raise ValueError(f"a sum of {limits.min_survivors} updates is too small for collusion = {collusion}")
    if limits.min_survivors > num_clients or threshold > degree + 1:
        raise ValueError(f"{num_clients} clients are fewer than a threshold of {threshold} and the smallest sum need")
    if degree == num_clients - 1:
        if not 2 * threshold > num_clients + collusion:
            raise ValueError(f"a threshold of {threshold} among {num_clients} clients does not resist {collusion}")
        return
    split = log2_split_view(num_clients, degree, threshold, collusion)
    parted = log2_parted(num_clients, degree, threshold, collusion)
    if max(split, parted) > LOG2_PRIVACY:
        raise ValueError(
            f"degree {degree} and threshold {threshold} among {num_clients} clients do not resist {collusion} "
            f"colluding ones: the bound is 2^{max(split, parted):.0f}, at most 2^{LOG2_PRIVACY:.0f} is accepted"
        )


def smallest_sum(collusion: int) -> int:
    """Return c + 2: with fewer updates in the sum, the colluding clients would know that of the only other client."""
    return collusion + 2


def _sparse(num_clients: int, collusion: int, dropped: int) -> tuple[int, int] | None:
    sizes = (num_clients, num_clients - dropped)  # the graph is made of those that send keys, and these may be as few

    def is_private(degree: int, threshold: int) -> bool:
        bounds = (log2_split_view, log2_parted)
        return all(bound(size, degree, threshold, collusion) <= LOG2_PRIVACY for bound in bounds for size in sizes)

    for degree in range(32, sizes[1] - 1, 2):
        threshold = next((t for t in range(degree // 2 + 1, degree + 1) if is_private(degree, t)), None)
        if threshold is not None and log2_abort(num_clients, degree, threshold, dropped) <= LOG2_ABORT:
            return degree, threshold
    return None
