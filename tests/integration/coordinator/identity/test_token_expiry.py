"""A token ends when it expires or is revoked, also for its streams and its requests that are still waiting."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from fedssl.client import Client, NotAuthenticated, Retry, WorkerClient
from fedssl.protocol.tokens import Role
from fedssl.protocol.views import TokenCreated
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.federation.events import endpoints as events
from fedssl_coordinator.federation.work import waiting_claims as work
from fedssl_coordinator.identity.openid.people import Person
from fedssl_coordinator.identity.tokens import service as tokens
from support.coordinator import Coordinator
from support.scenario import Scenario
from support.tables import Tables


def _client(coordinator: Coordinator, token: TokenCreated) -> Client:
    return Client(coordinator.url, token.secret, retry=Retry(seconds=0))


def test_a_lifetime_is_counted_by_the_databases_clock(coordinator: Coordinator) -> None:
    short = coordinator.client.create_token("viewer", lifetime_seconds=3600)
    for_ever = coordinator.client.create_token("viewer")
    assert short.expires_at == short.created_at + timedelta(hours=1)
    assert for_ever.expires_at is None
    assert {token.expires_at for token in coordinator.client.tokens()} == {None, short.expires_at}


def test_a_person_has_at_most_twenty_sessions_and_ended_ones_are_removed(
    coordinator: Coordinator, tables: Tables
) -> None:
    def sign_in(name: str) -> str:
        with transaction() as session:
            return str(tokens.sign_in(session, Person(f"https://a {name}", name, Role.VIEWER, {}), 60))

    def sessions_of(name: str) -> set[str]:
        return {str(token_id) for (token_id,) in tables.query("SELECT id FROM tokens WHERE label = %s", name)}

    others = {sign_in("Ada")}
    ids = [sign_in("Bea") for _ in range(22)]
    assert sessions_of("Bea") == set(ids[2:])
    tables.execute("UPDATE tokens SET revoked_at = now() WHERE label = 'Bea'")
    last = sign_in("Bea")
    assert sessions_of("Bea") == {last}
    assert sessions_of("Ada") == others
    assert len(list(coordinator.client.tokens())) == 4  # these two, the admin's and the operator's


def test_a_token_is_valid_until_it_expires(coordinator: Coordinator) -> None:
    token = coordinator.client.create_token("viewer", lifetime_seconds=1)
    assert token.expires_at is not None
    with _client(coordinator, token) as client:
        assert list(client.runs()) == []
        # The database and this process have the same clock.
        time.sleep(max(0.0, (token.expires_at - datetime.now(UTC)).total_seconds()) + 0.05)
        with pytest.raises(NotAuthenticated, match="expired"):
            list(client.runs())


def _seconds_until_refused(ask: Callable[[], object], end: Callable[[], None]) -> float:
    """Return the seconds from the call of `end` until a waiting request is refused."""
    refused: list[float] = []

    def wait() -> None:
        with pytest.raises(NotAuthenticated):
            ask()
        refused.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.5)
    ended = time.monotonic()
    end()
    waiting.join(20)
    assert refused, "still waiting, or answered"
    return refused[0] - ended


def _claim(coordinator: Coordinator, token: TokenCreated) -> Callable[[], object]:
    return lambda: WorkerClient(coordinator.url, token.secret, retry=Retry(seconds=0)).claim(20)


# A busy machine may take seconds to answer. So polls are frequent if only they find a change, and rare if a
# notification must arrive first.
OFTEN, RARELY = 0.2, 20.0
WITHIN = max(work.POLL_SECONDS, events.POLL_SECONDS) + 1


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the seconds between polls, which are few at first.

    Request this fixture before the coordinator, which then polls at this interval.
    """

    def every(seconds: float) -> None:
        for module in (work, events):
            monkeypatch.setattr(module, "POLL_SECONDS", seconds)

    every(OFTEN)
    return every


@pytest.mark.full
def test_a_waiting_claim_ends_with_its_token(
    polls: Callable[[float], None], coordinator: Coordinator, tables: Tables
) -> None:
    token = coordinator.client.create_token("worker", "a")
    assert _seconds_until_refused(_claim(coordinator, token), lambda: _expire(tables, token.id)) < WITHIN
    polls(RARELY)
    token = coordinator.client.create_token("worker", "a")
    at_once = _seconds_until_refused(_claim(coordinator, token), lambda: coordinator.client.revoke_token(token.id))
    assert at_once < RARELY / 2
    token = coordinator.client.create_token("worker", "a")
    at_once = _seconds_until_refused(_claim(coordinator, token), lambda: coordinator.client.revoke_client("a") and None)
    assert at_once < RARELY / 2


def test_a_stream_ends_with_its_token(
    polls: Callable[[float], None], coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "a", num_rounds=1)

    def watch(token: TokenCreated) -> Callable[[], object]:
        return lambda: list(_client(coordinator, token).events(scenario.id))

    token = coordinator.client.create_token("viewer")
    assert _seconds_until_refused(watch(token), lambda: _expire(tables, token.id)) < WITHIN
    polls(RARELY)
    token = coordinator.client.create_token("viewer")
    at_once = _seconds_until_refused(watch(token), lambda: coordinator.client.revoke_token(token.id))
    assert at_once < RARELY / 2


def _expire(tables: Tables, token_id: UUID) -> None:
    tables.execute("UPDATE tokens SET expires_at = now() WHERE id = %s", token_id)
