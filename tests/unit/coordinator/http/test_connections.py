"""Which connection is closed if there are too many. The tests set the clock."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from fedssl_coordinator.http.addresses import address_key, proxies
from fedssl_coordinator.http.connections import GRACE_SECONDS, Connections


@dataclass(eq=False)
class Fake:
    """A connection whose state is set by the test."""

    address: str | None
    opened_at: float
    is_known: bool = False
    caller: str = ""
    is_waiting: bool = True
    is_idle: bool = True
    closed: bool = field(default=False, init=False)

    def close_now(self) -> None:
        self.closed = True


class Server:
    """Connections with a clock that the test sets: 10 places, at most 3 per address."""

    def __init__(self) -> None:
        self.now = 0.0
        self.connections = Connections(10, 3, 10.0, lambda: self.now)
        self.opened: list[Fake] = []

    def open(self, address: str | None = "a", **state: Any) -> Fake:
        connection = Fake(address, self.now, **{"caller": f"token {len(self.opened)}", **state})
        if not self.connections.add(connection):
            connection.closed = True
        self.connections.recognise(connection)
        self.opened.append(connection)
        return connection

    def closed(self) -> list[int]:
        return [number for number, connection in enumerate(self.opened) if connection.closed]


@pytest.fixture
def server() -> Server:
    return Server()


def test_the_oldest_connection_of_the_address_with_most_connections_is_closed(server: Server) -> None:
    server.open("b")
    for _ in range(9):
        server.open("a")
    assert server.closed() == []
    server.open("c")
    assert server.closed() == [1]


def test_beyond_half_of_the_places_only_connections_older_than_the_grace_are_closed(server: Server) -> None:
    for _ in range(6):
        server.open()
    assert server.closed() == []
    server.now += GRACE_SECONDS
    server.open()
    server.open()
    assert server.closed() == [0, 1]


def test_connections_of_known_callers_are_kept(server: Server) -> None:
    known = [server.open(is_known=True) for _ in range(8)]
    for _ in range(20):
        server.open()
    assert not any(connection.closed for connection in known)
    assert len(server.closed()) == 18


def test_a_connection_with_a_running_request_is_not_closed(server: Server) -> None:
    server.open(is_waiting=False, is_idle=False)
    for _ in range(10):
        server.open()
    assert server.closed() == [1]


def test_if_all_callers_are_known_an_idle_connection_makes_room(server: Server) -> None:
    for number in range(10):
        server.open(is_known=True, is_waiting=False, is_idle=number == 4)
    server.open(is_known=True, is_waiting=False, is_idle=False)
    assert server.closed() == [4]
    server.open()
    assert server.closed() == [4, 11]  # the new connection gets no place


def test_a_place_is_released_only_once(server: Server) -> None:
    first = server.open()
    for _ in range(9):
        server.open()
    server.connections.remove(first)
    server.connections.remove(first)
    server.open()
    assert server.closed() == []
    server.open()
    assert server.closed() == [1]


def test_the_more_unknown_callers_there_are_the_less_time_a_head_has(server: Server) -> None:
    seconds = [server.connections.head_seconds(server.open(str(number))) for number in range(8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == 8.0
    assert seconds[-1] == GRACE_SECONDS


def test_an_address_with_many_unknown_callers_has_only_the_grace_and_a_proxy_has_more(server: Server) -> None:
    assert [server.connections.head_seconds(server.open("a")) > GRACE_SECONDS for _ in range(4)] == [True] * 3 + [False]
    other = Server()
    assert all(other.connections.head_seconds(other.open(None)) > GRACE_SECONDS for _ in range(4))


def test_callers_that_became_known_do_not_count_against_their_address(server: Server) -> None:
    workers = [server.open("a") for _ in range(3)]
    for worker in workers:
        worker.is_known = True
    assert server.connections.head_seconds(server.open("a")) > GRACE_SECONDS


def test_addresses_are_counted_by_network_and_listed_proxies_are_recognised() -> None:
    assert address_key("2001:db8:1:2::1") == address_key("2001:db8:1:2:3:4:5:6") != address_key("2001:db8:1:3::1")
    assert address_key("somewhere") == "unknown"
    is_proxy = proxies("10.0.0.0/8, 2001:db8::/32, name, 192.0.2.1")
    found = [is_proxy(host) for host in ("10.9.9.9", "2001:db8::1", "192.0.2.1", "192.0.2.2", "name", "")]
    assert found == [True, True, True, False, False, False]


def test_if_no_connection_is_idle_the_caller_with_most_requests_makes_room(server: Server) -> None:
    """One token with slow bodies or slow readers does not cause the others to be refused."""
    busy = {"is_known": True, "is_waiting": False, "is_idle": False}
    for caller in "abbbbcccdd":
        server.open(**busy, caller=caller)
    server.open(**busy, caller="d")
    assert server.closed() == [1]  # the oldest of b, which has more than 3
    server.open(**busy, caller="d")
    assert server.closed() == [1, 11]  # no caller has more than 3
