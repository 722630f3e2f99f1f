"""The graph of clients that exchange masks and shares: a regular graph that everyone computes from a public seed."""

import hashlib
from collections.abc import Collection, Iterable, Mapping


def ring_order(seed: bytes, clients: Iterable[str]) -> list[str]:
    """Return the clients in the order of SHA256(seed, client id)."""
    return sorted(clients, key=lambda client: hashlib.sha256(seed + client.encode()).digest())


def neighbours(seed: bytes, clients: Iterable[str], degree: int) -> dict[str, tuple[str, ...]]:
    """Return each client's neighbours, in name order.

    The clients stand on a ring in the order of a hash, and each is connected with the `degree` / 2 clients on either
    side. If the degree is at least the number of other clients, everyone is connected with everyone.

    Args:
        seed: public bytes that no client chose by itself.
        clients: different names.
        degree: even, unless everyone is connected with everyone.

    Example:
        >>> neighbours(b"", ["a", "b", "c"], 2)["b"]
        ('a', 'c')

    Reference: Bell et al. 2020, "Secure single-server aggregation with (poly)logarithmic overhead", section 3: Harary
    graphs under a random permutation of their nodes.
    """
    ring = ring_order(seed, clients)
    if len(set(ring)) != len(ring):
        raise ValueError("a client is in the graph twice")
    if degree >= len(ring) - 1:
        return {client: tuple(sorted(set(ring) - {client})) for client in ring}
    if degree < 2 or degree % 2:
        raise ValueError(f"the degree of a graph of {len(ring)} clients must be even and at least 2, not {degree}")
    distances = [d for d in range(-degree // 2, degree // 2 + 1) if d]
    return {
        client: tuple(sorted(ring[(place + d) % len(ring)] for d in distances)) for place, client in enumerate(ring)
    }


def is_connected(graph: Mapping[str, Iterable[str]], clients: Collection[str]) -> bool:
    """Return whether these clients, without the others of the graph, are connected.

    If they are not, their masks cancel within each part, and the coordinator learns the sum of each part.
    """
    left = set(clients)
    reached = [left.pop()] if left else []
    while reached:
        found = left.intersection(graph[reached.pop()])
        left -= found
        reached += found
    return not left
