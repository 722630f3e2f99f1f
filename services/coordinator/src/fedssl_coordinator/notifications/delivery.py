"""Delivers notifications that are due. Each delivery is sent at least once, with an id by which repeats are known."""

import json
import time
from uuid import UUID

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection

from fedssl.protocol.notifications import DestinationKind, Notification
from fedssl.protocol.states import RunState
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import exclusive, transaction
from fedssl_coordinator.core.metrics import NOTIFICATIONS
from fedssl_coordinator.core.models import NotificationDelivery, NotificationDestination
from fedssl_coordinator.core.outbox import UNATTENDED, UNSEEN
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import unattended, unseen
from fedssl_coordinator.notifications import emails, repository, service, webhooks

log = structlog.get_logger(__name__)

_PASS_SECONDS = 60.0
_MOST_RUNS = 500


def deliver_due() -> None:
    """Deliver what is due, for at most a minute. A destination that fails is not retried before the next call."""
    failed: set[UUID] = set()
    end = time.monotonic() + _PASS_SECONDS
    with transaction() as session:
        repository.remove_old(session)
    while time.monotonic() < end:
        with transaction() as session:
            claimed = repository.claim(session, failed)
            if claimed is None:
                return
            delivery, destination = claimed
            key = service.key_of(session, destination)
        error = _try(delivery, destination, key)
        with transaction() as session:
            repository.record_try(session, delivery, error)
        if error is not None:
            failed.add(destination.id)


def record_stalled() -> None:
    """Record an event for each run that waits for an aggregator, or only for clients that are absent.

    Each of the two is recorded only once until something else happens in the run. Does nothing while another process
    does the same.
    """
    with exclusive("stalled") as connection:
        if connection is not None:
            _record_stalled(connection)


def _record_stalled(connection: Connection) -> None:
    with transaction(connection) as session:
        runs = run_rows.newest_first(session, _MOST_RUNS, None, RunState.RUNNING)
        found = {UNSEEN: unseen.reasons(session, runs), UNATTENDED: unattended.reasons(session, runs)}
        for kind, reasons in found.items():
            for run in runs:
                if run.id in reasons and not repository.is_reported(session, run, kind, found):
                    record(session, kind, reasons[run.id], run_id=run.id)


def _try(delivery: NotificationDelivery, destination: NotificationDestination, key: bytes) -> str | None:
    """Make one attempt. Returns why it failed, or None."""
    try:
        if destination.kind == DestinationKind.WEBHOOK:
            body = json.dumps(delivery.payload, separators=(",", ":")).encode()
            webhooks.send(destination.target, key, delivery.id, body, settings())
        else:
            emails.send(destination.target, delivery.id, Notification.model_validate(delivery.payload), settings())
    except (webhooks.NotDelivered, ValidationError) as error:
        reason = printable(str(error), 500)
        NOTIFICATIONS.labels(destination.kind, "failed").inc()
        log.warning(
            "notification.failed",
            delivery=str(delivery.id),
            target=service.shown_target(destination),
            num_tries=delivery.num_tries,
            error=reason,
        )
        return reason
    NOTIFICATIONS.labels(destination.kind, "delivered").inc()
    return None
