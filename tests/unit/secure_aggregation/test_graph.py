"""Graphs: regular, symmetric, the same for all clients, different for each seed; and which clients are connected."""

import pytest

from fedssl.secure_aggregation.graph import is_connected, neighbours, ring_order

NAMES = [f"c{number}" for number in range(12)]


@pytest.mark.parametrize("degree", [2, 4, 6, 8, 10])
def test_every_client_has_degree_neighbours_and_the_graph_is_symmetric(degree: int) -> None:
    graph = neighbours(b"seed", NAMES, degree)
    for client, others in graph.items():
        assert len(set(others) - {client}) == len(others) == degree
        assert all(client in graph[other] for other in others)
    assert graph == neighbours(b"seed", reversed(NAMES), degree)
    assert graph != neighbours(b"another", NAMES, degree)


@pytest.mark.parametrize("degree", [11, 12, 128])
def test_a_large_degree_connects_all_clients(degree: int) -> None:
    graph = neighbours(b"", NAMES, degree)
    assert all(others == tuple(sorted(set(NAMES) - {client})) for client, others in graph.items())


@pytest.mark.parametrize("degree", [0, 1, 3, 9])
def test_an_odd_or_zero_degree_is_refused(degree: int) -> None:
    with pytest.raises(ValueError, match="must be even and at least 2"):
        neighbours(b"", NAMES, degree)


def test_a_client_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        neighbours(b"", ["a", "a", "b"], 2)


def test_a_ring_without_two_arcs_is_not_connected() -> None:
    ring, graph = ring_order(b"", NAMES), neighbours(b"", NAMES, 4)
    assert is_connected(graph, NAMES)
    assert is_connected(graph, [*ring[:3], *ring[4:9]])
    assert is_connected(graph, ring[2:])
    assert not is_connected(graph, [*ring[:3], *ring[5:9]])
