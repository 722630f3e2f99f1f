"""Projects: what separates groups of people at one coordinator."""

from typing import Annotated

from pydantic import Field, StringConstraints

from fedssl.protocol.tokens import PersonRole

DEFAULT_PROJECT = "default"

_NAME = r"[a-z0-9]+(?:-[a-z0-9]+)*"

ProjectName = Annotated[str, StringConstraints(pattern=f"^{_NAME}$", max_length=63)]
"""At most 63 lower-case letters and digits, with single hyphens between."""

WantedProject = Annotated[ProjectName | None, Field(exclude_if=lambda project: project is None)]
"""A request's project. Null is not sent: a coordinator without projects refuses the key."""

Grant = Annotated[str, StringConstraints(pattern=f"^(?:{_NAME}:)?(?:admin|operator|viewer)$", max_length=80)]
"""A role in every project, such as `viewer`, or in one, such as `cardiology:operator`."""


def parse_grant(grant: str) -> tuple[str | None, PersonRole]:
    """Return a grant's project, or None for every project, and its role.

    >>> parse_grant("viewer"), parse_grant("cardiology:operator")
    ((None, 'viewer'), ('cardiology', 'operator'))
    """
    project, _, role = grant.rpartition(":")
    return project or None, role  # type: ignore[return-value]  # the pattern allows no other role
