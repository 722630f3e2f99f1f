"""The errors for what a worker sends for its assignment, each with an event."""

from typing import Any

from fedssl_coordinator.core.models import Assignment
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.storage.artifacts.service import UpdatePermit


def refused(
    subject: Assignment | UpdatePermit,
    slug: str,
    detail: str,
    kind: str = "assignment.refused",
    data: dict[str, Any] | None = None,
    *,
    then: str = "",
) -> ProblemError:
    """Return the error. `then`: what the worker is to do now, which the event does not contain."""
    event = AuditEvent(kind, detail, subject.run_id, subject.round_number, subject.client_id, data or {})
    return ProblemError(slug, detail + then, audit_event=event)


def round_closed(assignment: Assignment) -> ProblemError:
    """Return the error for what arrives after the end of its round."""
    number = assignment.round_number
    detail = f"round {number} is no longer open: this came too late and changes nothing; claim new work"
    return refused(assignment, "round-closed", detail)


def lease_lost(assignment: Assignment) -> ProblemError:
    """Return the error for what arrives without a lease."""
    detail = f"the assignment is {assignment.state}" + (f" ({assignment.reason})" if assignment.reason else "")
    return refused(assignment, "lease-lost", detail, then=": claim again")


def not_uploaded(assignment: Assignment, digest: str) -> ProblemError:
    """Return the error for a submission without its artifact."""
    detail = f"artifact {digest} has not been uploaded for this assignment: upload it with PUT first"
    return refused(assignment, "conflict", detail)
