"""Errors as problem+json. A service raises `ProblemError`; one handler turns it into a response and an event."""

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from fedssl.errors import FedSSLError

_LONGEST = 2000

PREFIX = "urn:fedssl:problem:"

PROBLEMS: dict[str, tuple[int, str]] = {
    "invalid-request": (422, "The request makes no sense"),
    "unauthenticated": (401, "No valid token"),
    "forbidden": (403, "Not yours to do"),
    "not-found": (404, "Not found"),
    "method-not-allowed": (405, "Method not allowed"),
    "too-slow": (408, "The body stopped arriving"),
    "conflict": (409, "Not possible in this state"),
    "lease-lost": (409, "The lease is lost"),
    "duplicate-update": (409, "An update was already accepted"),
    "offset-mismatch": (409, "The upload goes on at another byte"),
    "round-closed": (410, "The round is closed"),
    "length-required": (411, "Content-Length is missing"),
    "protocol-version": (412, "Another version of the upload protocol"),
    "artifact-too-large": (413, "The artifact is too large"),
    "body-too-large": (413, "The body is too large"),
    "media-type": (415, "The body is of another type"),
    "range-not-satisfiable": (416, "The range lies outside the artifact"),
    "artifact-rejected": (422, "The artifact is not what was declared"),
    "upload-busy": (423, "The upload is being checked"),
    "too-many-requests": (429, "Asked too often"),
    "internal": (500, "The coordinator failed"),
    "unavailable": (503, "A server behind the coordinator does not answer"),
}


def printable(text: str, longest: int = _LONGEST) -> str:
    """Text that came from outside, as JSON and Postgres can hold it: no NUL, no lone surrogates, not too long."""
    whole = text[:longest].encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
    return whole if len(text) <= longest else f"{whole} ..."


@dataclass(frozen=True)
class Happening:
    """An event to record although the request changes nothing."""

    kind: str
    message: str
    run_id: UUID | None = None
    round_number: int | None = None
    client_id: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


class ProblemError(FedSSLError):
    """A request that is refused: `slug` for programs, `detail` for people, `happening` for the audit log."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        happening: Happening | None = None,
        errors: list[dict[str, Any]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = printable(detail)
        self.happening = happening
        self.errors = errors or []
        self.headers = headers

    @property
    def status(self) -> int:
        return PROBLEMS[self.slug][0]

    def body(self) -> dict[str, Any]:
        """The problem details of RFC 9457."""
        status, title = PROBLEMS[self.slug]
        return {
            "type": PREFIX + self.slug,
            "title": title,
            "status": status,
            "detail": self.detail,
            "errors": self.errors,
        }
