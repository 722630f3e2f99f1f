"""Every operation documents its roles and refuses all others. The tests follow the OpenAPI document, role by role."""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import httpx
import pytest
from starlette.routing import Route

from fedssl.protocol.tokens import LastingRole, Role
from fedssl_coordinator.app import create_app
from fedssl_coordinator.dashboard import endpoints as dashboard
from support.coordinator import Coordinator
from support.openapi import OPEN, WORKERS_ONLY, Operation, api_document, operations
from support.tables import Tables

APP = create_app()
OPERATIONS = operations(api_document())
GUARDED = [operation for operation in OPERATIONS if operation.template not in OPEN]
ADMINS, OPERATORS, VIEWERS = {"admin"}, {"admin", "operator"}, {"admin", "operator", "viewer"}


@dataclass(frozen=True)
class Token:
    secret: str
    id: str


@pytest.fixture(scope="module")
def made(shared_coordinator: Coordinator) -> dict[str, Token]:
    """Return a token of each role, by role."""

    def token(role: Role) -> Token:
        client_id = "a" if role is Role.WORKER else None
        made = (
            shared_coordinator.client.create_enrolment_token("b")
            if role is Role.ENROLMENT
            else shared_coordinator.client.create_token(role.value, client_id)
        )
        return Token(made.secret, str(made.id))

    return {role.value: token(role) for role in Role}


@pytest.fixture(scope="module")
def http(shared_coordinator: Coordinator) -> Iterator[httpx.Client]:
    """Yield a client without a token, with one connection for all calls."""
    with shared_coordinator.bare_http() as client:
        yield client


def _call(http: httpx.Client, operation: Operation, secret: str | None) -> httpx.Response:
    """Send a request that changes nothing even if it is permitted: it names an object that does not exist, or none."""
    content = {"/v1/work/claim": b'{"wait_seconds": 0}'}.get(operation.template, b"{}")
    headers = {"Content-Type": "application/json"} | ({} if secret is None else {"Authorization": f"Bearer {secret}"})
    return http.request(
        operation.method,
        operation.path,
        params=operation.query,
        content=content if operation.method == "POST" else b"",
        headers=headers,
    )


def test_every_operation_but_the_two_health_checks_has_roles() -> None:
    assert {o.template for o in OPERATIONS if not o.roles} == OPEN == {"/healthz", "/readyz"}
    assert {role for operation in GUARDED for role in operation.roles} == {role.value for role in Role}
    assert all("security" not in operation.document for operation in OPERATIONS if operation.template in OPEN)


def test_every_route_is_documented_or_a_page() -> None:
    documented = {operation.template for operation in OPERATIONS}
    addresses = {route.path for route in APP.routes if isinstance(route, Route)}
    pages = {route.path for route in dashboard.router.routes if isinstance(route, Route)}
    assert addresses - documented - pages == {"/openapi.json"}  # the document itself
    assert not any(path.startswith("/v1") for path in pages)
    assert documented | pages <= addresses


@pytest.mark.parametrize("operation", GUARDED, ids=str)
def test_each_operation_has_the_fewest_roles_that_its_work_needs(operation: Operation) -> None:
    """They are derived only from the path and the method, so that a new endpoint with too many roles is found."""
    match operation.method, operation.template:
        case _, path if path.startswith(WORKERS_ONLY):
            assert operation.roles == {"worker"}
        case _, "/v1/enrolments":
            assert operation.roles == {"enrolment"}
        case _, "/v1/artifacts/{digest}":  # single updates: not for viewers
            assert operation.roles == OPERATORS | {"worker"}
        case _, path if path.startswith("/v1/uploads"):
            assert operation.roles == OPERATORS | {"worker"}
        case _, path if path.startswith("/v1/tokens"):
            assert operation.roles == ADMINS
        case _, "/v1/clients/{client_id}/revoke" | "/v1/clients/{client_id}/identity":
            assert operation.roles == ADMINS
        case _, path if path.startswith("/v1/notification-destinations"):  # their secrets sign, their hosts are private
            assert operation.roles == ADMINS
        case "POST", "/v1/projects":
            assert operation.roles == ADMINS
        case "DELETE", "/v1/runs/{run_id}":
            assert operation.roles == ADMINS
        case "GET" | "HEAD", _:
            assert operation.roles == VIEWERS
        case _:
            assert operation.roles == OPERATORS


@pytest.mark.parametrize("operation", GUARDED, ids=str)
def test_each_role_can_call_its_own_operations_and_no_others(
    http: httpx.Client, made: dict[str, Token], operation: Operation
) -> None:
    assert _call(http, operation, None).status_code == 401
    for role, token in made.items():
        answer = _call(http, operation, token.secret)
        assert answer.status_code < 500, answer.text
        if role in operation.roles:
            assert answer.status_code not in (401, 403), answer.text
        else:
            assert answer.status_code == 403, answer.text
            if operation.method == "HEAD":
                continue  # answered without a body
            assert answer.json()["type"] == "urn:fedssl:problem:forbidden"
            assert f"yours is a{'n' * (role[0] in 'aeo')} {role}'s" in answer.json()["detail"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    "end", ["expires_at = now()", "revoked_at = now()", "revoked_at = now() - interval '1 day'"], ids=str
)
def test_an_expired_or_revoked_token_is_refused_everywhere(
    http: httpx.Client, made: dict[str, Token], tables: Tables, end: str
) -> None:
    for token in made.values():
        tables.execute(f"UPDATE tokens SET {end} WHERE id = %s", token.id)  # type: ignore[arg-type]
    try:
        for operation in GUARDED:
            other = next(role for role in made if role not in operation.roles)
            for token in (made[role] for role in (*operation.roles, other)):
                answer = _call(http, operation, token.secret)
                assert answer.status_code == 401, (str(operation), answer.text)
                assert operation.method == "HEAD" or "expired or revoked" in answer.json()["detail"]
    finally:
        tables.execute(
            "UPDATE tokens SET revoked_at = NULL, "
            "expires_at = CASE WHEN role = 'enrolment' THEN now() + interval '1 day' END"
        )


def test_the_documented_table_lists_the_same_roles() -> None:
    """The table is in docs/operations/access.md. If two of its rows match an operation, the lower one applies."""
    text = (Path(__file__).parents[4] / "docs" / "operations" / "access.md").read_text()
    section = text.partition("## Tokens and roles")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    assert set(heads[1:]) == {role.value for role in Role}
    decided: dict[str, tuple[int, set[str]]] = {}
    for number, (what, *cells) in enumerate(rows):
        roles = {role for role, cell in zip(heads[1:], cells, strict=True) if cell not in ("", "open")}
        for pattern in re.findall(r"`([A-Z]+ [^`]+)`", what):
            fitting = [operation for operation in OPERATIONS if fnmatch.fnmatchcase(str(operation), pattern)]
            assert fitting, pattern
            decided |= {str(operation): (number, roles) for operation in fitting}
    assert {name: roles for name, (_, roles) in decided.items()} == {str(o): o.roles for o in OPERATIONS}
    assert {number for number, _ in decided.values()} == set(range(len(rows)))


def test_the_lasting_roles_are_all_but_enrolment() -> None:
    assert set(get_args(LastingRole)) == {role.value for role in Role} - {"enrolment"}


def test_an_admin_can_do_what_an_operator_can_and_an_operator_what_a_viewer_can() -> None:
    for operation in GUARDED:
        assert ("viewer" not in operation.roles) or "operator" in operation.roles
        assert ("operator" not in operation.roles) or "admin" in operation.roles
