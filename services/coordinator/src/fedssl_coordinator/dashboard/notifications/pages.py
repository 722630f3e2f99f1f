"""`/notifications`: the destinations of notifications, with a test of each; for admins."""

from typing import Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.responses import Response

from fedssl.protocol.notifications import DestinationKind, Topic
from fedssl.protocol.views import DestinationCreate, DestinationCreated
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout.mistakes import NO_MISTAKE, Mistake, mistake_of
from fedssl_coordinator.dashboard.layout.page import PageRoute, render, see_other
from fedssl_coordinator.dashboard.session import Form, MayRevoke, Revoking, Visitor
from fedssl_coordinator.notifications import repository, service

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/notifications")
def show_notifications(visitor: MayRevoke, session: DB) -> Response:
    """Show the destinations, their last deliveries, and the form that adds one."""
    return _page(visitor, session)


@router.post("/notifications")
def add(visitor: Revoking, form: Form, session: DB) -> Response:
    """Add a destination. The answer shows a webhook's secret, and nothing else ever does."""
    target = form.get("target", "").strip()
    kind = DestinationKind.EMAIL if "@" in target and "://" not in target else DestinationKind.WEBHOOK
    topics = [topic for topic in Topic if f"on-{topic}" in form]
    try:
        request = DestinationCreate.model_validate(
            {"kind": kind, "target": target, "topics": topics, "label": form.get("label", "").strip()}
        )
        added = service.create(session, request)
    except ValidationError as error:
        wrong = mistake_of(error, {"topics": "Notified of: choose at least one topic"}, "target")
        return _page(visitor, session, form=form, wrong=wrong, status=422)
    except ProblemError as error:
        return _page(visitor, session, form=form, wrong=mistake_of(error, {}, "target"), status=error.status)
    return _page(visitor, session, added=added)


@router.post("/notifications/{destination_id}/test")
def send_test(destination_id: UUID, visitor: Revoking, session: DB) -> Response:
    """Queue a test notification."""
    service.send_test(session, destination_id)
    return see_other("/notifications")


def _page(
    visitor: Visitor,
    session: DB,
    *,
    form: dict[str, str] | None = None,
    wrong: Mistake = NO_MISTAKE,
    added: DestinationCreated | None = None,
    status: int = 200,
) -> Response:
    rows = repository.oldest_first(session, service.MOST_DESTINATIONS, None)
    context: dict[str, Any] = {
        "destinations": service.views(session, rows),
        "topics": list(Topic),
        "form": {f"on-{topic}": "on" for topic in Topic} if form is None else form,
        "wrong": wrong,
        "added": added,
    }
    return render("notifications.html", visitor, status=status, **context)
