"""The errors of requests to the coordinator.

FedSSLError
└── ClientError               the coordinator did not do what was asked, or could not be asked
    ├── Unreachable           no response: the connection was refused, timed out or broke
    ├── InvalidRequest        an argument that cannot be sent
    ├── RunNotFinished        a run did not finish while the caller waited for it
    ├── Untrusted             a certificate of one side that the other does not accept
    ├── StoreUnreachable      an object store that may not or cannot be used; ask the coordinator for the bytes
    ├── BadAnswer             a response that cannot be parsed
    │   ├── UnknownWork       a work item that this version does not understand; it can be declined
    │   └── UnknownEvaluation an evaluation at this site that this version does not understand; it can be refused
    └── ApiError              the coordinator refused; `problem` is its explanation
        ├── NotAuthenticated  401, the token is missing, wrong, expired or revoked
        ├── NotAllowed        403, the token's role may not do this
        ├── NotFound          404
        ├── Conflict          409
        │   ├── LeaseLost         the assignment no longer belongs to this worker
        │   └── DuplicateUpdate   another update of this client was accepted for the round
        ├── Gone              410, the round has closed
        ├── Rejected          413 or 422, the request or the artifact is not acceptable
        ├── TryAgain          408 or 423, the same request may succeed in a moment
        ├── TooManyRequests   429, retry after `retry_after` seconds
        └── ServerError       5xx
            └── Unavailable   502, 503 or 504: the same request may succeed later
"""

from typing import TYPE_CHECKING
from uuid import UUID

from fedssl.errors import FedSSLError
from fedssl.protocol.errors import Problem
from fedssl.protocol.validation import describe_problems, validation_problems
from fedssl.wording import plural, printable

if TYPE_CHECKING:
    from pydantic import ValidationError

    from fedssl.protocol.views import RunView

PROBLEM_PREFIX = "urn:fedssl:problem:"
_ERRORS_SHOWN = 5
_LONGEST = 4000  # a coordinator sends at most 2000 characters


class ClientError(FedSSLError):
    """The coordinator did not do what was asked, or could not be asked."""


class InvalidRequest(ClientError):
    """An argument cannot be sent, for the reasons in `problems`. Nothing was sent."""

    def __init__(self, error: "ValidationError") -> None:
        super().__init__(describe_problems(error))
        self.problems = validation_problems(error)


class RunNotFinished(ClientError):
    """A run did not finish while the caller waited for it. `run` is its last known state."""

    def __init__(self, run: "RunView") -> None:
        super().__init__(
            f"run {run.id} is {run.state.value} after {run.rounds_closed} of {plural(run.num_rounds, 'round')}: "
            "wait longer, or without timeout_seconds"
        )
        self.run = run


class Unreachable(ClientError):
    """There was no response. If `maybe_sent`, the request may have arrived and taken effect."""

    def __init__(self, message: str, *, maybe_sent: bool = True) -> None:
        super().__init__(message)
        self.maybe_sent = maybe_sent


class Untrusted(ClientError):
    """One side does not accept the certificate of the other."""


class StoreUnreachable(ClientError):
    """The object store that the coordinator named may not or cannot be used: ask the coordinator for the bytes."""


class BadAnswer(ClientError):
    """The response cannot be parsed: it is from another program, or from another version of the coordinator."""


class UnknownWork(BadAnswer):
    """A work item that this version does not understand, for example an unknown method. Decline `assignment_id`."""

    def __init__(self, assignment_id: UUID, message: str) -> None:
        super().__init__(message)
        self.assignment_id = assignment_id


class UnknownEvaluation(BadAnswer):
    """An evaluation at this site that this version does not understand. Refuse `evaluation_id`."""

    def __init__(self, evaluation_id: UUID, round_number: int, message: str) -> None:
        super().__init__(message)
        self.evaluation_id = evaluation_id
        self.round_number = round_number


class ApiError(ClientError):
    """The coordinator responded with an error."""

    def __init__(self, problem: Problem, retry_after: float | None = None) -> None:
        super().__init__(_describe(problem))
        self.problem = problem
        self.retry_after = retry_after
        """Seconds after which to retry, if the coordinator sent them."""

    @property
    def slug(self) -> str:
        """Return the problem's stable name, for example `lease-lost`; empty if the response is not a coordinator's."""
        return self.problem.type.removeprefix(PROBLEM_PREFIX) if self.problem.type.startswith(PROBLEM_PREFIX) else ""


class NotAuthenticated(ApiError):
    """The token is missing, wrong, expired or revoked."""


class NotAllowed(ApiError):
    """The token's role may not do this."""


class NotFound(ApiError):
    """There is nothing with this name."""


class Conflict(ApiError):
    """The current state does not allow the request."""


class LeaseLost(Conflict):
    """The assignment no longer belongs to this worker."""


class DuplicateUpdate(Conflict):
    """Another update of this client was accepted for the round."""


class Gone(ApiError):
    """The round has closed."""


class Rejected(ApiError):
    """The request or the artifact is not acceptable."""


class TryAgain(ApiError):
    """The request arrived too slowly, or something that it needs is locked for a moment."""


class TooManyRequests(ApiError):
    """The client sent too many requests."""


class ServerError(ApiError):
    """The coordinator failed."""


class Unavailable(ServerError):
    """The coordinator, or something that it needs, does not answer at the moment."""


_BY_SLUG: dict[str, type[ApiError]] = {"lease-lost": LeaseLost, "duplicate-update": DuplicateUpdate}
_BY_STATUS: dict[int, type[ApiError]] = {
    401: NotAuthenticated,
    403: NotAllowed,
    404: NotFound,
    408: TryAgain,
    409: Conflict,
    410: Gone,
    413: Rejected,
    422: Rejected,
    423: TryAgain,
    429: TooManyRequests,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def api_error(problem: Problem, retry_after: float | None = None) -> ApiError:
    """Return an error of the class that fits the problem.

    >>> api_error(Problem(type="urn:fedssl:problem:lease-lost", title="Lease lost", status=409, detail="Claim again."))
    LeaseLost('Claim again.')
    """
    kind = _BY_SLUG.get(problem.type.removeprefix(PROBLEM_PREFIX)) or _BY_STATUS.get(problem.status)
    if kind is None:
        kind = ServerError if problem.status >= 500 else ApiError
    return kind(problem, retry_after)


def _describe(problem: Problem) -> str:
    """Return the detail, and a line per error whose message the detail does not contain."""
    lines = [_short(problem.detail or problem.title)]
    errors = [error for error in problem.errors if str(error.get("msg", error)) not in lines[0]]
    for error in errors[:_ERRORS_SHOWN]:
        loc = error.get("loc")
        place = ".".join(str(part) for part in loc) if isinstance(loc, list | tuple) else ""
        message = _short(str(error.get("msg", error)))
        lines.append(f"  {_short(place)}: {message}" if place else f"  {message}")
    if len(errors) > _ERRORS_SHOWN:
        lines.append(f"  and {len(errors) - _ERRORS_SHOWN} more")
    return "\n".join(lines)


def _short(text: str) -> str:
    """Return text that was sent from outside in a form that a log or a terminal can show."""
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
