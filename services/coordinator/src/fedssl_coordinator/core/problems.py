"""Errors as problem+json (RFC 9457). Services raise `ProblemError`; one handler creates the response and the event."""

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from starlette.responses import JSONResponse

from fedssl.errors import FedSSLError
from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE

_LONGEST = 2000

PREFIX = "urn:fedssl:problem:"

PROBLEMS: dict[str, tuple[int, str]] = {
    "invalid-request": (422, "Invalid request"),
    "unauthenticated": (401, "No valid token"),
    "forbidden": (403, "Not permitted"),
    "not-found": (404, "Not found"),
    "method-not-allowed": (405, "Method not allowed"),
    "too-slow": (408, "The body stopped arriving"),
    "conflict": (409, "Not possible in this state"),
    "lease-lost": (409, "The lease was lost"),
    "duplicate-update": (409, "An update was already accepted"),
    "offset-mismatch": (409, "The upload continues at another byte"),
    "round-closed": (410, "The round is closed"),
    "length-required": (411, "Content-Length is missing"),
    "protocol-version": (412, "Unsupported version of the upload protocol"),
    "artifact-too-large": (413, "The artifact is too large"),
    "body-too-large": (413, "The body is too large"),
    "media-type": (415, "Unsupported type of the body"),
    "range-not-satisfiable": (416, "The range is outside the artifact"),
    "artifact-rejected": (422, "The artifact is not what was declared"),
    "upload-busy": (423, "The upload is being checked"),
    "too-many-requests": (429, "Too many requests"),
    "head-too-large": (431, "The head of the request is too large"),
    "internal": (500, "The coordinator failed"),
    "unavailable": (503, "Temporarily unavailable"),
}


def printable(text: str, longest: int = _LONGEST) -> str:
    """Return text from outside in a form for JSON and Postgres: no NUL, no lone surrogates, not too long."""
    whole = text[:longest].encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
    return whole if len(text) <= longest else f"{whole} ..."


@dataclass(frozen=True)
class AuditEvent:
    """An event to record even though the request changes nothing."""

    kind: str
    message: str
    run_id: UUID | None = None
    round_number: int | None = None
    client_id: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


class ProblemError(FedSSLError):
    """A refused request: `slug` for programs, `detail` for people, `audit_event` for the audit log."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        audit_event: AuditEvent | None = None,
        errors: list[dict[str, Any]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = printable(detail)
        self.audit_event = audit_event
        self.errors = errors or []
        self.headers = headers

    @property
    def status(self) -> int:
        return PROBLEMS[self.slug][0]

    def body(self) -> dict[str, Any]:
        """Return the problem details of RFC 9457."""
        status, title = PROBLEMS[self.slug]
        return {
            "type": PREFIX + self.slug,
            "title": title,
            "status": status,
            "detail": self.detail,
            "errors": self.errors,
        }


def problem_response(problem: ProblemError) -> JSONResponse:
    """Return the response that reports a problem; it is an ASGI application, so that middlewares can send it too."""
    return JSONResponse(
        problem.body(), status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=problem.headers
    )


def invalid_spec(key: str, message: str) -> ProblemError:
    """Return a 422 that names a key of a new run's spec."""
    loc = ["spec", *key.split(".")]
    detail = f"nothing was changed; correct this and send it again: {'.'.join(loc)}"
    audit_event = AuditEvent("request.refused", f"POST /v1/runs: {'.'.join(loc)}: {message}")
    return ProblemError("invalid-request", detail, errors=[{"loc": loc, "msg": message}], audit_event=audit_event)
