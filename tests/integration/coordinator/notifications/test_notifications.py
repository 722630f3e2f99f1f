"""Notifications: written with their events, signed, retried, limited, and without data that must not leave."""

import json
import logging
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from uuid import UUID

import httpcore
import pytest
from standardwebhooks import Webhook

from fedssl.client import ApiError, Conflict, InvalidRequest
from fedssl.protocol.notifications import DeliveryState, Notification, NotificationData
from fedssl.protocol.views import DeliveryView, DestinationCreated
from fedssl.protocol.work import Submit
from fedssl_coordinator.core import outbox
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import NotificationDestination
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.notifications import delivery, emails, repository, service, webhooks
from fedssl_coordinator.notifications.public_network import ForbiddenAddress, PublicNetwork
from support.certificates import Authority
from support.coordinator import Coordinator
from support.federation import tensors_for, upload
from support.receivers import Hook, MailServer
from support.scenario import Scenario
from support.tables import Tables

Change = Callable[..., None]


@pytest.fixture
def local(change_settings: Change) -> None:
    """Allow webhooks to this machine, without TLS."""
    change_settings(NOTIFY_ALLOW_HTTP="true", NOTIFY_ALLOW_NETWORKS="127.0.0.0/8")


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as running:
        yield running


def _add(coordinator: Coordinator, hook: Hook, *topics: str) -> DestinationCreated:
    return coordinator.client.create_notification_destination(
        "webhook", f"{hook.url}/a-secret-path", *([topics] if topics else [])
    )


def _deliveries(coordinator: Coordinator, destination_id: UUID) -> list[DeliveryView]:
    return list(coordinator.client.notification_deliveries(destination_id))


def _bodies(hook: Hook) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in hook.received]


def _wait_is_over(tables: Tables) -> None:
    tables.execute("UPDATE notification_deliveries SET next_try_at = now() WHERE state = 'pending'")


def test_a_test_notification_is_signed_as_the_standard_requires(
    coordinator: Coordinator, hook: Hook, local: None
) -> None:
    created = _add(coordinator, hook)
    assert created.secret is not None
    sent = coordinator.client.test_notification_destination(created.id)
    coordinator.notify()

    [request] = hook.received
    assert request.path == "/a-secret-path"
    verified = Webhook(created.secret).verify(request.body, request.headers)
    assert Notification.model_validate(verified).type == "test"
    assert request.headers["webhook-id"] == str(sent.id)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(created.secret).verify(request.body.replace(b"test", b"rest"), request.headers)
    [delivery] = _deliveries(coordinator, created.id)
    assert (delivery.state, delivery.num_tries, delivery.error) == (DeliveryState.DELIVERED, 1, None)
    [shown] = coordinator.client.notification_destinations()
    assert shown.last_delivery == delivery


def test_each_destination_has_its_own_secret_which_is_shown_once(
    coordinator: Coordinator, hook: Hook, local: None, tables: Tables
) -> None:
    one, other = _add(coordinator, hook), _add(coordinator, hook)
    assert one.secret is not None
    assert one.secret != other.secret
    assert one.secret not in repr(one)
    with coordinator.http() as http:
        listed = http.get("/v1/notification-destinations").text
        events = str(tables.query("SELECT message, data::text FROM events"))
    for secret in (one.secret, "a-secret-path"):
        assert secret not in listed
        assert secret not in events
    assert not tables.query("SELECT 1 FROM notification_destinations d WHERE d::text LIKE %s", f"%{one.secret[6:]}%")


def test_declines_and_a_failed_run_are_notified(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    scenario = Scenario(coordinator, tables, tmp_path, cohort={"max_attempts": 1, "min_updates": 2})
    for name in "ab":
        scenario.workers[name].decline(scenario.claim(name).assignment_id, "the policy refuses it", "client-data")
    scenario.advance()
    coordinator.notify()

    declined, failed = _bodies(hook)
    assert declined["type"] == "declined", "once per round, of two declines"
    assert declined["data"]["client"] == "a"
    assert "the policy refuses it" in declined["data"]["message"]
    assert failed["type"] == "failed"
    assert failed["data"]["outcome"] == "failed"
    assert failed["data"]["run"] == str(scenario.id)
    assert failed["data"]["run_name"] == scenario.run.name
    for body in (declined, failed):
        Notification.model_validate(body)


def test_an_alarm_a_pause_and_a_stop_are_notified(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook, "alarm", "stalled", "finished")
    watch = {"min_effective_rank": 1e6, "first_round": 1, "action": "pause"}
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=3, watch=watch)
    for name, worker in scenario.workers.items():
        item = scenario.claim(name)
        digest = upload(worker, item, tensors_for(item.plan.update), tmp_path)
        metrics = {"loss": 0.5, "effective_rank": 3.0}
        worker.submit(Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics=metrics))
    scenario.advance()
    coordinator.client.stop(scenario.id)
    coordinator.notify()
    assert [body["type"] for body in _bodies(hook)] == ["alarm", "stalled", "finished"]
    assert [body["data"]["kind"] for body in _bodies(hook)] == ["run.alarm", "run.paused", "run.finished"]


def test_an_operators_pause_is_not_notified(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    scenario = Scenario(coordinator, tables, tmp_path)
    coordinator.client.pause(scenario.id)
    coordinator.notify()
    assert hook.received == []


def test_a_pause_clears_the_reason_why_the_run_waited_and_is_not_notified(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    scenario = Scenario(coordinator, tables, tmp_path, cohort={"clients": None, "min_clients": 3})
    assert scenario.run.reason == "waiting for clients: 2 of 3 have registered"
    assert coordinator.client.pause(scenario.id).reason is None
    coordinator.notify()
    assert [body["data"]["kind"] for body in _bodies(hook)] == ["run.waiting"]


def test_a_destination_gets_only_the_topics_that_it_asked_for(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook, "failed", "alarm")
    coordinator.client.stop(Scenario(coordinator, tables, tmp_path).id)
    coordinator.notify()
    assert hook.received == []


def test_a_run_that_no_aggregator_takes_up_is_reported_once(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    scenario = Scenario(coordinator, tables, tmp_path)
    for name in "ab":
        scenario.claim(name)
        scenario.deliver(name)
    tables.execute("UPDATE assignments SET closed_at = now() - interval '10 minutes'")
    tables.execute("UPDATE rounds SET deadline = deadline - interval '20 minutes'")
    coordinator.notify()
    coordinator.notify()
    [body] = _bodies(hook)
    assert (body["type"], body["data"]["kind"]) == ("stalled", outbox.UNATTENDED)
    assert "waiting for an aggregator" in body["data"]["message"]


def test_a_run_that_waits_only_for_absent_clients_is_reported_once(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    scenario = Scenario(coordinator, tables, tmp_path)
    scenario.claim("a")
    scenario.deliver("a")
    coordinator.notify()
    assert hook.received == [], "b has been seen"
    tables.execute("UPDATE clients SET last_seen_at = now() - interval '10 minutes'")
    coordinator.notify()
    coordinator.notify()
    [body] = _bodies(hook)
    assert (body["type"], body["data"]["kind"]) == ("stalled", outbox.UNSEEN)
    assert "waiting for clients: b: not seen for more than 90 s" in body["data"]["message"]


def test_a_run_without_aggregator_and_clients_is_reported_once_for_each(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    Scenario(coordinator, tables, tmp_path)
    tables.execute("UPDATE clients SET last_seen_at = now() - interval '10 minutes'")
    tables.execute("UPDATE rounds SET deadline = now() - interval '10 minutes'")
    for _ in range(4):
        coordinator.notify()
    assert sorted(body["data"]["kind"] for body in _bodies(hook)) == [outbox.UNATTENDED, outbox.UNSEEN]


def test_two_processes_that_find_a_stalled_run_at_once_report_it_once(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path)
    tables.execute("UPDATE clients SET last_seen_at = now() - interval '10 minutes'")
    is_reported, others = repository.is_reported, ThreadPoolExecutor(1)

    def and_another(*arguments: Any) -> bool:
        found = is_reported(*arguments)
        monkeypatch.setattr(repository, "is_reported", is_reported)
        others.submit(delivery.record_stalled).result(10)
        return found

    monkeypatch.setattr(repository, "is_reported", and_another)
    delivery.record_stalled()
    assert len(scenario.events(outbox.UNSEEN)) == 1


def test_a_rolled_back_event_is_not_notified(coordinator: Coordinator, hook: Hook, local: None) -> None:
    created = _add(coordinator, hook)
    with transaction() as session:
        record(session, "artifact.damaged", "gone")
        session.flush()
        session.rollback()
    assert _deliveries(coordinator, created.id) == []


def test_a_notification_has_a_shortened_message_and_no_data_of_its_event(
    coordinator: Coordinator, hook: Hook, local: None
) -> None:
    _add(coordinator, hook)
    with transaction() as session:
        record(session, "artifact.damaged", "m" * 1000, data={"tensor": [1.5, 2.5], "labels": [3, 7]})
    coordinator.notify()
    [body] = _bodies(hook)
    assert set(body["data"]) == {"event", "kind", "message"}
    assert body["data"]["message"] == "m" * outbox.MESSAGE_CHARACTERS + " ..."


def test_a_failed_delivery_is_retried_with_the_same_id_after_growing_pauses(
    coordinator: Coordinator, hook: Hook, local: None, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    created = _add(coordinator, hook)
    coordinator.client.test_notification_destination(created.id)
    hook.statuses[:] = [500, 302]
    coordinator.notify()
    coordinator.notify()
    assert len(hook.received) == 1, "not before the pause is over"
    [first] = _deliveries(coordinator, created.id)
    assert (first.state, first.error) == (DeliveryState.PENDING, "answered with 500")
    assert "a-secret-path" not in caplog.text
    _wait_is_over(tables)
    coordinator.notify()
    [second] = _deliveries(coordinator, created.id)
    assert "302, a redirect, which is not followed" in (second.error or "")
    assert first.next_try_at is not None
    assert second.next_try_at is not None
    assert second.next_try_at > first.next_try_at
    _wait_is_over(tables)
    coordinator.notify()
    assert [request.headers["webhook-id"] for request in hook.received] == [str(first.id)] * 3
    assert _deliveries(coordinator, created.id)[0].state is DeliveryState.DELIVERED


def test_a_delivery_is_given_up_after_the_last_try(
    coordinator: Coordinator, hook: Hook, local: None, tables: Tables
) -> None:
    created = _add(coordinator, hook)
    coordinator.client.test_notification_destination(created.id)
    tables.execute("UPDATE notification_deliveries SET num_tries = %s", repository.MOST_TRIES - 1)
    hook.statuses[:] = [503]
    coordinator.notify()
    [delivery] = _deliveries(coordinator, created.id)
    assert (delivery.state, delivery.num_tries) == (DeliveryState.FAILED, repository.MOST_TRIES)
    assert delivery.next_try_at is None
    coordinator.notify()
    assert len(hook.received) == 1


def test_no_delivery_is_lost_if_its_process_dies_while_sending(
    coordinator: Coordinator, hook: Hook, local: None, tables: Tables
) -> None:
    created = _add(coordinator, hook)
    coordinator.client.test_notification_destination(created.id)
    with transaction() as session:
        claimed = repository.claim(session, [])
    assert claimed is not None, "and here the process dies"
    _wait_is_over(tables)
    coordinator.notify()
    [delivery] = _deliveries(coordinator, created.id)
    assert (delivery.state, delivery.num_tries) == (DeliveryState.DELIVERED, 2)


def test_a_destination_that_does_not_answer_delays_no_other(
    coordinator: Coordinator, hook: Hook, local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "SECONDS", 1.0)
    with Hook() as dead:
        dead.silent.set()
        silent = _add(coordinator, dead)
        for _ in range(5):
            coordinator.client.test_notification_destination(silent.id)
        created = _add(coordinator, hook)
        coordinator.client.test_notification_destination(created.id)
        began = time.monotonic()
        coordinator.notify()
        assert time.monotonic() - began < 4
        assert len(dead.received) == 1
    assert len(hook.received) == 1
    [tried] = [found for found in _deliveries(coordinator, silent.id) if found.num_tries]
    assert tried.error == "no answer within 1 s"


def test_the_backlog_of_a_silent_destination_lets_others_go_first(
    coordinator: Coordinator, hook: Hook, local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a few silent destinations, each of which takes a sixth of a pass, would take all of every pass."""
    silent, created = _add(coordinator, hook), _add(coordinator, hook)
    for destination in (silent, silent, created):
        coordinator.client.test_notification_destination(destination.id)
    tried: list[UUID] = []

    def use_up_the_pass(_: object, destination: NotificationDestination, key: bytes) -> str | None:
        tried.append(destination.id)
        return "no answer" if destination.id == silent.id else None

    monkeypatch.setattr(delivery, "_try", use_up_the_pass)
    monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=lambda: len(tried) * delivery._PASS_SECONDS))
    for _ in range(2):
        coordinator.notify()
    assert tried == [silent.id, created.id]


def test_a_destination_that_answers_byte_by_byte_is_cut_off(
    coordinator: Coordinator, local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from support.listening import Listener

    class Dripping(Listener):
        def _serve(self, client: socket.socket) -> None:
            for _ in range(100):
                client.sendall(b"H")
                time.sleep(0.2)

    monkeypatch.setattr(webhooks, "SECONDS", 1.0)
    with Dripping() as server:
        created = coordinator.client.create_notification_destination("webhook", server.url)
        coordinator.client.test_notification_destination(created.id)
        began = time.monotonic()
        coordinator.notify()
        assert time.monotonic() - began < 3
    assert _deliveries(coordinator, created.id)[0].error is not None


def test_the_pending_deliveries_of_a_destination_are_limited(
    coordinator: Coordinator, hook: Hook, local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MOST_PENDING", 3)
    created = _add(coordinator, hook)
    for _ in range(5):
        with transaction() as session:
            record(session, "artifact.damaged", "again")
    assert len(_deliveries(coordinator, created.id)) == 3
    with pytest.raises(ApiError, match="3 notifications wait"):
        coordinator.client.test_notification_destination(created.id)


def test_old_deliveries_are_removed(coordinator: Coordinator, hook: Hook, local: None, tables: Tables) -> None:
    created = _add(coordinator, hook)
    coordinator.client.test_notification_destination(created.id)
    coordinator.notify()
    tables.execute("UPDATE notification_deliveries SET ended_at = now() - interval '31 days'")
    coordinator.notify()
    assert _deliveries(coordinator, created.id) == []


def test_the_number_of_destinations_is_bounded(
    coordinator: Coordinator, hook: Hook, local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_DESTINATIONS", 2)
    first, _ = _add(coordinator, hook), _add(coordinator, hook)
    with pytest.raises(Conflict, match="there are 2 destinations: remove one first"):
        _add(coordinator, hook)
    coordinator.client.remove_notification_destination(first.id)
    _add(coordinator, hook)


def test_pages_of_destinations_and_deliveries_have_each_once_in_order(
    coordinator: Coordinator, hook: Hook, local: None, tables: Tables
) -> None:
    destinations = [_add(coordinator, hook).id for _ in range(3)]
    sent = [coordinator.client.test_notification_destination(destinations[0]).id for _ in range(3)]
    assert _pages(coordinator, "") == destinations
    assert _pages(coordinator, f"/{destinations[0]}/deliveries") == sent[::-1]
    tables.execute("UPDATE notification_destinations SET created_at = now()")
    tables.execute("UPDATE notification_deliveries SET created_at = now()")
    assert _pages(coordinator, "") == sorted(destinations)
    assert _pages(coordinator, f"/{destinations[0]}/deliveries") == sorted(sent, reverse=True)


def _pages(coordinator: Coordinator, path: str) -> list[UUID]:
    """Return the ids of all pages of a list, one item on each page."""
    found: list[UUID] = []
    params = {"limit": "1"}
    with coordinator.http() as http:
        while len(found) < 10:
            page = http.get(f"/v1/notification-destinations{path}", params=params).json()
            found += [UUID(item["id"]) for item in page["items"]]
            if page["next_cursor"] is None:
                break
            params["cursor"] = page["next_cursor"]
    return found


def test_a_removed_destination_gets_no_notification(coordinator: Coordinator, hook: Hook, local: None) -> None:
    created = _add(coordinator, hook)
    coordinator.client.test_notification_destination(created.id)
    coordinator.client.remove_notification_destination(created.id)
    coordinator.notify()
    assert hook.received == []
    assert list(coordinator.client.notification_destinations()) == []


def test_an_uncommitted_removal_delays_and_refuses_no_event(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, hook: Hook, local: None
) -> None:
    removed, other = _add(coordinator, hook), _add(coordinator, hook)
    scenario = Scenario(coordinator, tables, tmp_path)
    with transaction() as session:
        service.remove(session, removed.id)
        scenario.workers["a"].decline(scenario.claim("a").assignment_id, "no images", "client-data")
        with transaction() as alarm:
            record(alarm, "artifact.damaged", "gone")
    assert [delivery.topic for delivery in _deliveries(coordinator, other.id)] == ["alarm", "declined"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("https://127.0.0.1/x", "has the address 127.0.0.1, which is not public"),
        ("https://[::1]/x", "has the address ::1, which is not public"),
        ("https://[::ffff:10.0.0.1]/", "10.0.0.1, which is not public"),
        ("https://169.254.169.254/latest/meta-data", "which is not public"),
        ("https://[64:ff9b::7f00:1]/", "which is not public"),
        ("https://[64:ff9b:1::a00:1]/", "which is not public"),
        ("https://[fec0::1]/", "which is not public"),
        ("https://[2002:7f00:1::1]/", "which is not public"),
        ("https://[ff0e::1]/", "which is not public"),
        ("https://192.0.0.192/opc/v2", "which is not public"),
        ("http://hooks.example.org/", "http URLs are not allowed"),
        ("alice@example.org", "no SMTP server"),
    ],
)
def test_a_destination_that_can_never_be_reached_is_refused(coordinator: Coordinator, target: str, said: str) -> None:
    kind = "email" if "@" in target else "webhook"
    with pytest.raises(ApiError, match=said):
        coordinator.client.create_notification_destination(kind, target)


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("webhook", "hooks.example.org", "not the URL of a webhook"),
        ("webhook", "ftp://hooks.example.org", "not the URL of a webhook"),
        ("webhook", "https://user:password@example.org", "must not contain a user"),
        ("webhook", "https://example.org/ü", "other characters than ASCII"),
        ("webhook", "https://example.org:99999/", "not the URL of a webhook"),
        ("email", "alice", "not an e-mail address"),
        ("email", "alice@example.org\r\nBcc: eve@example.org", "not an e-mail address"),
    ],
)
def test_invalid_addresses_are_refused(coordinator: Coordinator, kind: str, target: str, said: str) -> None:
    with coordinator.http() as http:
        answer = http.post("/v1/notification-destinations", json={"kind": kind, "target": target})
    assert answer.status_code == 422
    assert said in answer.text


def test_a_name_that_resolves_to_this_machine_is_not_connected_to(
    coordinator: Coordinator, hook: Hook, change_settings: Change
) -> None:
    change_settings(NOTIFY_ALLOW_HTTP="true")
    url = hook.url.replace("127.0.0.1", "localhost")
    created = coordinator.client.create_notification_destination("webhook", url)
    coordinator.client.test_notification_destination(created.id)
    coordinator.notify()
    [delivery] = _deliveries(coordinator, created.id)
    assert "which is not public" in (delivery.error or "")
    assert hook.received == []


def test_no_address_of_a_name_may_be_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a name with two addresses could lead to the second one, and a name that changes to another one."""

    def resolve(host: str, port: int, **options: Any) -> list[Any]:
        if host == "nowhere.example":
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("93.184.215.14", "10.0.0.1")]

    connected: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", lambda self, host, *_: connected.append(host))
    network = PublicNetwork([], seconds=5)
    with pytest.raises(ForbiddenAddress, match=r"two\.example has the address 10\.0\.0\.1"):
        network.connect_tcp("two.example", 443)
    assert connected == []
    PublicNetwork([ip_network("10.0.0.0/8")], seconds=5).connect_tcp("two.example", 443)
    assert connected == ["93.184.215.14"]
    with pytest.raises(httpcore.ConnectError, match=r"nowhere\.example cannot be resolved"):
        network.connect_tcp("nowhere.example", 443)


def test_a_name_that_resolves_too_slowly_delays_no_other_destination(
    coordinator: Coordinator, hook: Hook, local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, is_over = socket.getaddrinfo, threading.Event()

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "slow.example":
            is_over.wait(20)
        return resolve("127.0.0.1" if host == "slow.example" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(webhooks, "SECONDS", 1.0)
    unresolved = coordinator.client.create_notification_destination("webhook", "https://slow.example/")
    for created in (unresolved, _add(coordinator, hook)):
        coordinator.client.test_notification_destination(created.id)
    started = time.monotonic()
    coordinator.notify()
    took = time.monotonic() - started
    is_over.set()
    assert took < 10
    assert len(hook.received) == 1
    [delivery] = _deliveries(coordinator, unresolved.id)
    assert delivery.error == "ConnectError: the name slow.example was not resolved within 1 s"


def test_an_address_of_no_ip_version_delays_no_other_destination(
    coordinator: Coordinator, hook: Hook, local: None
) -> None:
    impossible = coordinator.client.create_notification_destination("webhook", "https://[v1.a]/")
    for created in (impossible, _add(coordinator, hook)):
        coordinator.client.test_notification_destination(created.id)
    coordinator.notify()
    assert len(hook.received) == 1
    [delivery] = _deliveries(coordinator, impossible.id)
    assert delivery.error == "Invalid IPv6 address: '[v1.a]'"


def test_the_scheme_of_a_webhook_is_case_insensitive(coordinator: Coordinator) -> None:
    created = coordinator.client.create_notification_destination("webhook", "HTTPS://localhost/x")
    coordinator.client.test_notification_destination(created.id)
    coordinator.notify()
    [delivery] = _deliveries(coordinator, created.id)
    assert "which is not public" in (delivery.error or "")


def test_https_checks_the_certificate(coordinator: Coordinator, change_settings: Change, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    change_settings(NOTIFY_ALLOW_NETWORKS="127.0.0.1/32")
    with Hook(authority.sign("receiver", "127.0.0.1")) as hook:
        created = _add(coordinator, hook)
        coordinator.client.test_notification_destination(created.id)
        coordinator.notify()
        assert "CERTIFICATE_VERIFY_FAILED" in (_deliveries(coordinator, created.id)[0].error or "")
        assert hook.received == []
        change_settings(NOTIFY_CA_FILE=str(authority.file))
        coordinator.client.test_notification_destination(created.id)
        coordinator.notify()
        assert len(hook.received) == 1


def test_mail_is_sent_with_starttls_and_a_password(
    coordinator: Coordinator, change_settings: Change, tmp_path: Path, tables: Tables
) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "password").write_text("mail-password\n")
    with MailServer(authority.sign("mail", "127.0.0.1")) as server:
        change_settings(
            SMTP_HOST="127.0.0.1", SMTP_PORT=str(server.port), SMTP_USER="fedssl", SMTP_FROM="fedssl@example.org",
            SMTP_PASSWORD_FILE=str(tmp_path / "password"), NOTIFY_CA_FILE=str(authority.file),
        )  # fmt: skip
        created = coordinator.client.create_notification_destination("email", "alice@example.org", ["finished"])
        assert created.secret is None
        scenario = Scenario(coordinator, tables, tmp_path)
        coordinator.client.stop(scenario.id)
        server.is_refusing = True
        coordinator.notify()
        [refused] = _deliveries(coordinator, created.id)
        assert "451" in (refused.error or "")
        server.is_refusing = False
        _wait_is_over(tables)
        coordinator.notify()
        [message] = server.messages
        assert message["To"] == "alice@example.org"
        assert message["Subject"] == f"[fedssl] finished: {scenario.run.name}"
        assert message["Message-ID"] == f"<{refused.id}@fedssl>"
        text = message.get_payload()
        assert f"({scenario.id})" in text
        assert "Outcome: stopped" in text

        (tmp_path / "password").write_text("wrong-password")
        coordinator.client.test_notification_destination(created.id)
        coordinator.notify()
        [newest, *_] = _deliveries(coordinator, created.id)
        assert "SMTPAuthenticationError" in (newest.error or "")
        assert "wrong-password" not in (newest.error or "")


@pytest.mark.parametrize(
    ("security", "steps"),
    [
        ("none", ["SMTP 25"]),
        ("tls", ["SMTP_SSL 465 with certificates", "login alice secret"]),
        ("starttls", ["SMTP 587", "starttls with certificates", "login alice secret"]),
    ],
)
def test_mail_goes_by_the_security_that_is_set(
    security: str, steps: list[str], monkeypatch: pytest.MonkeyPatch, change_settings: Change
) -> None:
    taken: list[str] = []

    class Server:
        def __init__(self, host: str, port: int, *, timeout: float, context: ssl.SSLContext | None = None) -> None:
            assert (host, timeout) == ("mail.example.org", 10.0)
            taken.append(f"{type(self).__name__} {port}{_checked(context)}")

        def starttls(self, *, context: ssl.SSLContext) -> None:
            taken.append(f"starttls{_checked(context)}")
            if is_refusing:
                raise smtplib.SMTPException("no")

        def login(self, user: str, password: str) -> None:
            taken.append(f"login {user} {password}")

        def send_message(self, message: Any, sender: str, recipients: list[str]) -> None:
            taken.append(f"from {sender} to {recipients[0]}")

        def close(self) -> None:
            taken.append("close")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    def _checked(context: ssl.SSLContext | None) -> str:
        return "" if context is None or context.verify_mode != ssl.CERT_REQUIRED else " with certificates"

    def send() -> None:
        data = NotificationData(kind="test", message="a test")
        notification = Notification(type="test", timestamp=datetime.now(UTC), data=data)
        emails.send("bob@example.org", UUID(int=1), notification, settings())

    is_refusing = False
    monkeypatch.setattr(smtplib, "SMTP", type("SMTP", (Server,), {}))
    monkeypatch.setattr(smtplib, "SMTP_SSL", type("SMTP_SSL", (Server,), {}))
    user = {} if security == "none" else {"SMTP_USER": "alice", "SMTP_PASSWORD": "secret"}
    change_settings(
        DATABASE_URL="postgresql+psycopg://unused", REDIS_URL="redis://unused", STORE_PATH="unused",
        SMTP_HOST="mail.example.org", SMTP_FROM="fedssl@example.org", SMTP_SECURITY=security, **user,
    )  # fmt: skip
    send()
    assert taken == [*steps, "from fedssl@example.org to bob@example.org", "close"]
    if security == "starttls":
        taken.clear()
        is_refusing = True
        with pytest.raises(webhooks.NotDelivered, match="SMTPException: no"):
            send()
        assert taken == ["SMTP 587", "starttls with certificates", "close"], "no password is sent in clear text"


def test_a_message_cannot_change_the_headers_of_a_mail() -> None:
    data = NotificationData(event=1, kind="run.finished", run_name="x\r\nBcc: eve@example.org", message="a\nb")
    notification = Notification(type="failed", timestamp=datetime.now(UTC), data=data)
    message = emails._message("fedssl@example.org", "alice@example.org", UUID(int=1), notification)
    assert "Bcc" not in message
    assert message["Subject"] == "[fedssl] failed: x  Bcc: eve@example.org"


def test_only_admins_manage_destinations(coordinator: Coordinator) -> None:
    with coordinator.http(coordinator.operator_token) as http:
        assert http.get("/v1/notification-destinations").status_code == 403


def test_unknown_topics_are_refused(coordinator: Coordinator) -> None:
    with pytest.raises(InvalidRequest):
        coordinator.client.create_notification_destination("webhook", "https://example.org", ["everything"])


def test_metrics_count_notifications(coordinator: Coordinator, hook: Hook, local: None) -> None:
    created = _add(coordinator, hook)
    coordinator.client.test_notification_destination(created.id)
    with coordinator.http() as http:
        assert 'fedssl_notifications{state="pending"} 1.0' in http.get("/metrics").text
        coordinator.notify()
        assert 'fedssl_notifications{state="delivered"} 1.0' in http.get("/metrics").text
