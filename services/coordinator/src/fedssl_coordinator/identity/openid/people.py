"""People and their roles, read from the claims of the provider."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedssl.protocol.projects import parse_grant
from fedssl.protocol.tokens import Role
from fedssl_coordinator.core.problems import ProblemError, printable

_RANK = (Role.ADMIN, Role.OPERATOR, Role.VIEWER)
_LABELS = ("preferred_username", "email", "name", "sub")
_LABEL_CHARACTERS = 100
_SUBJECT_CHARACTERS = 255  # the limit of OpenID Connect
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Person:
    """Someone whom a provider has authenticated. `subject` is unique among all providers; `label` is for people.

    `role`: in every project; None for a member of some projects, whose roles there are `memberships`.
    """

    subject: str
    label: str
    role: Role | None
    memberships: Mapping[str, Role]


def person_of(claims: Mapping[str, Any], issuer: str, roles_claim: str, roles: Mapping[str, str]) -> Person:
    """Return the person with the highest roles that the claim's values map to. Raises ProblemError if there are none.

    A role in every project comes before roles in some of them.
    """
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= _SUBJECT_CHARACTERS or not subject.isprintable():
        raise ProblemError("unauthenticated", f"{issuer} gives no usable identifier (the claim `sub`) for this person")
    label = next(text for name in _LABELS if isinstance(text := claims.get(name), str) and text)
    label = printable(label)[:_LABEL_CHARACTERS]
    values = values_at(claims, roles_claim)
    found = {parse_grant(roles[value]) for value in values if value in roles}
    highest = {project: role for role in reversed(_RANK) for project, granted in found if granted == role}
    if not highest:
        has = ", ".join(printable(value, 50) for value in values[:_SHOWN]) or "nothing"
        detail = (
            f"{issuer} knows you as {label}, but you have no role here: your claim `{roles_claim}` contains {has}, and "
            f"a role needs one of {', '.join(sorted(roles)[:_SHOWN])}; ask those who run the provider to add you to "
            "one, or sign in with a token"
        )
        raise ProblemError("forbidden", detail)
    if (role := highest.get(None)) is not None:
        return Person(f"{issuer} {subject}", label, role, {})
    return Person(f"{issuer} {subject}", label, None, {project: role for project, role in highest.items() if project})


def values_at(claims: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts of a claim, which may be one text or a list, and lie in nested objects.

    >>> values_at({"groups": ["a", "b", 3]}, "groups"), values_at({"role": "a"}, "role")
    (['a', 'b'], ['a'])
    >>> values_at({"realm_access": {"roles": ["a"]}}, "realm_access.roles"), values_at({}, "groups")
    (['a'], [])
    >>> values_at({"https://example.org/roles": ["a"]}, "https://example.org/roles")
    ['a']
    """
    value: object = claims.get(name)
    if value is None:
        value = claims
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]
