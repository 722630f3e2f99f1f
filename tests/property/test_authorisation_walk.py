"""Every kind of caller calls every operation for real objects of other owners. One table lists the expected answers.

The table is complete by construction: an operation without a row fails. For an object that a caller may not see, the
answer is that for a missing object, apart from ids, times and sizes. `make fuzz` tries more combinations of callers
and objects.
"""

import base64
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import httpx
import pytest

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import SECURE_PROTOCOL
from fedssl.protocol.tokens import Role
from fedssl.protocol.work import DELIVERY_HEADER
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes, write_file
from support.evaluated_runs import add_embedding_map
from support.federation import deliver, tiny_spec
from support.fuzzing import examples
from support.openapi import OPEN, api_document, operations
from support.scenario import Scenario
from support.servers import Servers
from support.tables import ChangeWatcher, Tables
from support.weights import encoder_file

OPERATIONS = {str(operation): operation for operation in operations(api_document())}
ADMINS, OPERATORS, VIEWERS = {"admin"}, {"admin", "operator"}, {"admin", "operator", "viewer"}
WORKERS, ENROLMENTS = {"worker"}, {"enrolment"}
SENDERS = OPERATORS | WORKERS
SOME_INVALID = {"nobody", "bad token", "revoked worker", "expires admin"}
Ids = dict[str, str]
Owner = Literal["anyone", "broadcast", "assignment", "upload"]


@dataclass(frozen=True)
class Row:
    """The roles of an operation, the answers to a permitted caller, and the owner of the objects that it names.

    `anyone`: every permitted role may see them. `broadcast`: a worker may see one only if it was sent to it.
    `assignment`: only its worker. `upload`: only the token that began it. Other callers, and those of another project,
    are answered 404. `names`: the ids in the operation's path or body.
    """

    roles: set[str]
    answered: set[int]
    names: tuple[str, ...] = ()
    owner: Owner = "anyone"
    body: Callable[[Ids], Any] | None = None
    params: Callable[[Ids], dict[str, str]] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    everywhere: bool = False
    """True if it needs a token for every project."""


def _metadata(ids: Ids) -> str:
    pairs = {"digest": "0" * 64, "assignment": ids["assignment"]}
    return ",".join(f"{name} {base64.b64encode(value.encode()).decode()}" for name, value in pairs.items())


TUS = {"Tus-Resumable": "1.0.0"}
PART = {**TUS, "Upload-Offset": "0", "Content-Type": "application/offset+octet-stream"}
REGISTER = {"worker_version": "1", "methods": {"fedalignuniform": 1}, "device": "cpu", "num_images": 9, "channels": 1,
            "image_size": 8}  # fmt: skip

TABLE: dict[str, Row] = {
    "GET /healthz": Row(set(), {200}),
    "GET /readyz": Row(set(), {200}),
    "GET /metrics": Row(VIEWERS, {200}, everywhere=True),
    "GET /v1/methods": Row(VIEWERS, {200}),
    "GET /v1/methods/{name}": Row(VIEWERS, {200, 404}),
    "GET /v1/runs": Row(VIEWERS, {200}),
    "POST /v1/runs": Row(
        OPERATORS, {201}, body=lambda ids: {"spec": RunSpec(name="walk").model_dump(mode="json"), "start": False}
    ),
    "POST /v1/estimates": Row(
        OPERATORS, {200}, body=lambda ids: {"spec": RunSpec(name="walk").model_dump(mode="json")}
    ),
    "GET /v1/runs/{run_id}": Row(VIEWERS, {200}, ("run_id",)),
    "PATCH /v1/runs/{run_id}": Row(OPERATORS, {200}, ("run_id",), body=lambda ids: {"tags": ["walk"]}),
    "GET /v1/runs/{run_id}/rounds": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/rounds/{number}/assignments": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/metrics": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/events": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/events/stream": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/model": Row(VIEWERS, {200}, ("run_id",)),
    "HEAD /v1/runs/{run_id}/model": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/dimension-assignments": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/distillation-jobs": Row(VIEWERS, {200}, ("run_id",)),
    "GET /v1/runs/{run_id}/evaluations": Row(VIEWERS, {200}, ("run_id",)),
    "POST /v1/runs/{run_id}/evaluations": Row(
        OPERATORS, {200, 201, 409, 422}, ("run_id",), body=lambda ids: {"config": {"dataset": ids["name"]}}
    ),
    "GET /v1/runs/{run_id}/cross-site": Row(VIEWERS, {404}, ("run_id",)),
    "GET /v1/runs/{run_id}/site-evaluations": Row(VIEWERS, {200}, ("run_id",)),
    "POST /v1/runs/{run_id}/site-evaluations": Row(OPERATORS, {200, 201, 409}, ("run_id",), body=lambda ids: {}),
    "POST /v1/runs/{run_id}/start": Row(OPERATORS, {200, 409}, ("run_id",)),
    "POST /v1/runs/{run_id}/pause": Row(OPERATORS, {200, 409}, ("run_id",)),
    "POST /v1/runs/{run_id}/resume": Row(OPERATORS, {200, 409}, ("run_id",)),
    "POST /v1/runs/{run_id}/continue": Row(OPERATORS, {200, 409}, ("run_id",), body=lambda ids: {"num_rounds": 99_999}),
    "GET /v1/distillation-jobs/{job_id}": Row(VIEWERS, {200}, ("job_id",)),
    "POST /v1/distillation-jobs/{job_id}/cancel": Row(OPERATORS, {200, 409}, ("job_id",)),
    "GET /v1/evaluations/{evaluation_id}": Row(VIEWERS, {200}, ("evaluation_id",)),
    "GET /v1/evaluations/{evaluation_id}/map": Row(VIEWERS, {200}, ("evaluation_id",)),
    "POST /v1/evaluations/{evaluation_id}/cancel": Row(OPERATORS, {200, 409}, ("evaluation_id",)),
    "GET /v1/public-datasets": Row(VIEWERS, {200}),
    "POST /v1/public-datasets": Row(
        OPERATORS, {404}, body=lambda ids: {"name": "walk", "digest": "0" * 64, "split": "test"}
    ),
    "GET /v1/public-datasets/{name}": Row(VIEWERS, {200}, ("name",)),
    "GET /v1/evaluation-datasets": Row(VIEWERS, {200}),
    "POST /v1/evaluation-datasets": Row(OPERATORS, {404}, body=lambda ids: {"name": "walk", "digest": "0" * 64}),
    "GET /v1/evaluation-datasets/{name}": Row(VIEWERS, {200}, ("name",)),
    "GET /v1/weights": Row(VIEWERS, {200}),
    "POST /v1/weights": Row(
        OPERATORS,
        {404},
        body=lambda ids: {"name": "walk", "digest": "0" * 64, "family": "fedssl", "source_digest": "0" * 64},
    ),
    "GET /v1/weights/{name}": Row(VIEWERS, {200, 404}, ("name",)),  # another caller may have removed them
    "DELETE /v1/weights/{name}": Row(OPERATORS, {204, 404}, ("name",)),
    "GET /v1/clients": Row(VIEWERS, {200}),
    "GET /v1/clients/{client_id}": Row(VIEWERS, {200}, ("client_id",)),
    "PATCH /v1/clients/{client_id}": Row(OPERATORS, {200}, ("client_id",), body=lambda ids: {"display_name": "Ada"}),
    "GET /v1/clients/{client_id}/ledger-anchors": Row(VIEWERS, {200}, ("client_id",)),
    "GET /v1/data-card": Row(VIEWERS, {200}),
    "GET /v1/projects": Row(VIEWERS, {200}),
    "POST /v1/projects": Row(ADMINS, {201, 200}, body=lambda ids: {"name": "walk"}, everywhere=True),
    "GET /v1/tokens": Row(ADMINS, {200}),
    "POST /v1/tokens": Row(ADMINS, {201}, body=lambda ids: {"role": "viewer"}),
    "GET /v1/notification-destinations": Row(ADMINS, {200}),
    "POST /v1/notification-destinations": Row(
        ADMINS, {201}, body=lambda ids: {"kind": "webhook", "target": "https://hooks.example.org/"}
    ),
    "POST /v1/notification-destinations/{destination_id}/test": Row(ADMINS, {202}, ("destination_id",)),
    "GET /v1/notification-destinations/{destination_id}/deliveries": Row(ADMINS, {200}, ("destination_id",)),
    "POST /v1/enrolment-tokens": Row(OPERATORS, {201}, body=lambda ids: {"client_id": "newcomer"}),
    "POST /v1/enrolments": Row(ENROLMENTS, {201}, body=lambda ids: {"token_hash": "1" * 64}),
    "GET /v1/artifacts/{digest}": Row(SENDERS, {200}, ("digest",), "broadcast"),
    "HEAD /v1/artifacts/{digest}": Row(SENDERS, {200}, ("digest",), "broadcast"),
    "PUT /v1/artifacts/{digest}": Row(
        SENDERS, {413, 422}, ("assignment",), "assignment",
        params=lambda ids: {"assignment": ids["assignment"]}, content=b"\x08\0\0\0\0\0\0\0{}      " + bytes(8),
    ),
    "POST /v1/uploads": Row(SENDERS, {201}, ("assignment",), "assignment", headers=TUS),
    "HEAD /v1/uploads/{upload_id}": Row(SENDERS, {200}, ("upload_id",), "upload", headers=TUS),
    "PATCH /v1/uploads/{upload_id}": Row(SENDERS, {422}, ("upload_id",), "upload", headers=PART, content=b"x"),
    "POST /v1/uploads/{upload_id}/parts": Row(SENDERS, {404}, ("upload_id",), "upload"),
    "DELETE /v1/uploads/{upload_id}": Row(SENDERS, {204}, ("upload_id",), "upload", headers=TUS),
    "POST /v1/work/register": Row(WORKERS, {200}, body=lambda ids: REGISTER),
    "POST /v1/work/claim": Row(WORKERS, {200, 204}, body=lambda ids: {"wait_seconds": 0}),
    "POST /v1/work/data-report": Row(WORKERS, {200}, body=lambda ids: {"num_unreadable": 0}),
    "POST /v1/work/ended-runs": Row(WORKERS, {200}, body=lambda ids: {"run_ids": [ids["run_id"], ids["deleted"]]}),
    "POST /v1/work/site-evaluations/claim": Row(WORKERS, {200, 204}),
    # No site of this walk has one. tests/integration/coordinator/federation/test_site_evaluations.py has foreign ones.
    "POST /v1/work/site-evaluations/submit": Row(
        WORKERS,
        {404},
        body=lambda ids: {"evaluation_id": ids["evaluation_id"], "round_number": 1, "refusal": "no labels"},
    ),
    "POST /v1/work/heartbeat": Row(
        WORKERS, {200}, ("assignment",), "assignment", body=lambda ids: {"assignment_id": ids["assignment"]}
    ),
    "POST /v1/work/submit": Row(
        WORKERS, {409}, ("assignment",), "assignment",
        body=lambda ids: {"assignment_id": ids["assignment"], "update": "0" * 64, "num_examples": 5},
    ),
    "POST /v1/work/deliver": Row(
        WORKERS, {413, 422}, ("assignment",), "assignment", content=b"x" * 16,
    ),
    "POST /v1/work/secure/send": Row(  # the walk's run has no secure aggregation
        WORKERS, {409}, ("assignment",), "assignment",
        body=lambda ids: {
            "assignment_id": ids["assignment"],
            "protocol": SECURE_PROTOCOL,
            "message": {"phase": "confirmations", "signature": "0" * 128},
        },
    ),
    "POST /v1/work/secure/status": Row(
        WORKERS, {409}, ("assignment",), "assignment", body=lambda ids: {"assignment_id": ids["assignment"]}
    ),
    "POST /v1/work/decline": Row(
        WORKERS, {200}, ("assignment",), "assignment",
        body=lambda ids: {"assignment_id": ids["assignment"], "reason": "no"},
    ),
    # These end objects that the other operations need.
    "POST /v1/runs/{run_id}/stop": Row(OPERATORS, {200, 409}, ("run_id",)),
    "DELETE /v1/runs/{run_id}": Row(ADMINS, {204, 409}, ("run_id",)),
    "DELETE /v1/notification-destinations/{destination_id}": Row(ADMINS, {204, 404}, ("destination_id",)),
    "DELETE /v1/tokens/{token_id}": Row(ADMINS, {204}, ("token_id",)),
    "POST /v1/clients/{client_id}/identity": Row(
        ADMINS, {409}, ("client_id",), body=lambda ids: {"identity": "0" * 64}
    ),
    "POST /v1/clients/{client_id}/revoke": Row(ADMINS, {200}, ("client_id",)),
}  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """A kind of caller. `role` is None if its credential is not valid."""

    name: str
    role: str | None
    authorization: str | None
    is_stranger: bool = False
    """True if the token is for another project than the one that all objects belong to."""


class World:
    """Two runs, each with its own workers. The callers request their objects."""

    def __init__(self, coordinator: Coordinator, tables: Tables, folder: Path) -> None:
        self.coordinator, self.tables = coordinator, tables
        admin = coordinator.client
        with coordinator.worker("gone") as gone:
            deleted = admin.create_run(tiny_spec(cohort={"clients": ["gone"]}, num_rounds=1)).id
            coordinator.advance(deleted)
            item = gone.claim(0)
            assert item is not None
            deliver(gone, item, folder, 1.0)
            coordinator.advance(deleted)
            admin.delete_run(deleted)
        self.scenario = Scenario(coordinator, tables, folder, "ab", num_rounds=3)
        self.scenario.work("a", value=1.0)
        self.scenario.work("b", value=2.0)
        self.scenario.advance()
        self.scenario.claim("a")
        admin.add_public_dataset("scans", write_file(folder, public_bytes()))
        admin.add_evaluation_dataset("scans", write_file(folder, labelled_bytes()))
        admin.add_weights("scans", encoder_file(folder))
        # With the same seed, its first broadcast would be that of `a` and `b` in round 1.
        other = Scenario(coordinator, tables, folder, "c", num_rounds=3, seed=1)
        other.claim("c")
        evaluation_id, job_id = uuid4(), uuid4()
        add_embedding_map(tables, self.scenario.id, evaluation_id)
        tables.execute("INSERT INTO distillation_jobs (id, run_id, round_number, state, num_epochs, finished_at) "
                       "VALUES (%s, %s, 1, 'completed', 1, now())", job_id, self.scenario.id)  # fmt: skip
        destination = admin.create_notification_destination("webhook", "https://hooks.example.org/")
        leaver = admin.create_token("worker", "leaver")
        self.worker_token = coordinator.worker_token("a")
        self.real: Ids = {
            "run_id": str(self.scenario.id),
            "deleted": str(deleted),
            "assignment": str(self.scenario.item("a").assignment_id),
            "digest": str(self.scenario.item("a").broadcast),
            "client_id": "leaver",
            "token_id": str(leaver.id),
            "name": "scans",
            "job_id": str(job_id),
            "evaluation_id": str(evaluation_id),
            "destination_id": str(destination.id),
        }
        self.real["upload_id"] = self.begun(self.worker_token, self.real)
        self.nothing: Ids = {name: str(UUID(int=7)) for name in self.real} | {
            "digest": "7" * 64, "client_id": "nobody", "name": "nothing", "deleted": str(UUID(int=8)),
        }  # fmt: skip
        self.others: Ids = {
            **self.real,
            "run_id": str(other.id),
            "assignment": str(other.item("c").assignment_id),
            "digest": str(other.item("c").broadcast),
            "client_id": "c",
        }
        self.callers = self._callers()

    def _callers(self) -> list[Caller]:
        admin = self.coordinator.client
        found = [
            Caller("nobody", None, None),
            Caller("basic", None, "Basic b3BlcmF0b3I6"),
            Caller("bad token", None, "Bearer fedssl_" + "x" * 43),
        ]
        for role in ("admin", "operator", "viewer", "worker"):
            for end in ("revoked_at = now()", "expires_at = now()"):
                token = admin.create_token(role, "a" if role == "worker" else None)
                self.tables.execute(f"UPDATE tokens SET {end} WHERE id = %s", token.id)  # type: ignore[arg-type]
                found.append(Caller(f"{end[:7]} {role}", None, f"Bearer {token.secret}"))
        for role in ("admin", "operator", "viewer"):
            found.append(Caller(role, role, f"Bearer {admin.create_token(role).secret}"))
        admin.create_project("elsewhere")
        for role in ("admin", "operator", "viewer"):
            secret = admin.create_token(role, project="elsewhere").secret
            found.append(Caller(f"stranger {role}", role, f"Bearer {secret}", is_stranger=True))
        found.append(Caller("enrolment", "enrolment", f"Bearer {admin.create_enrolment_token('invited').secret}"))
        found.append(Caller("worker a", "worker", f"Bearer {self.worker_token}"))
        for name in "bc":
            found.append(Caller(f"worker {name}", "worker", f"Bearer {self.coordinator.worker_token(name)}"))
        return found

    def begun(self, secret: str, ids: Ids) -> str:
        """Begin an upload for the assignment with this token, and return its id."""
        headers = {**TUS, "Upload-Length": "1000", "Upload-Metadata": _metadata(ids)}
        with self.coordinator.http(secret) as http:
            answer = http.post("/v1/uploads", headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.headers["location"].rpartition("/")[2])


@pytest.fixture(scope="module")
def world(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("walk")
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, folder / "store", FEDSSL_CLAIM_WAIT_SECONDS="0") as running,
        Tables(url) as tables,
    ):
        yield World(running, tables, folder)


def _ask(world: World, http: httpx.Client, name: str, caller: Caller, ids: Ids) -> httpx.Response:
    operation, row = OPERATIONS[name], TABLE[name]
    if operation.method == "PUT":
        ids = {**ids, "digest": "5" * 64}  # of no file: the body for a stored file is not read
    headers = dict(row.headers)
    if caller.authorization is not None:
        headers["Authorization"] = caller.authorization
    if name == "POST /v1/uploads":
        headers |= {"Upload-Length": "1000", "Upload-Metadata": _metadata(ids)}
    if name == "POST /v1/work/deliver":
        submission = {"assignment_id": ids["assignment"], "update": "0" * 64, "num_examples": 5}
        headers[DELIVERY_HEADER] = json.dumps(submission)
    params = dict(row.params(ids)) if row.params else {}
    if name.startswith("PUT") and caller.role in OPERATORS:
        params = {}
    content = row.content
    if row.body is not None:
        content, headers["Content-Type"] = json.dumps(row.body(ids)).encode(), "application/json"
    path = operation.template.format(number=1, **ids)
    if name.endswith("/stream"):
        with http.stream(operation.method, path, headers=headers) as answer:
            if answer.status_code >= 400:
                answer.read()
            return answer
    return http.request(operation.method, path, headers=headers, params=params, content=content)


def _expected(world: World, row: Row, caller: Caller, ids: Ids) -> set[int]:
    """Return the statuses in the table. There may be several, because objects change during the walk."""
    if not row.roles:
        return row.answered
    if caller.role is None:
        return {401}
    if caller.role not in row.roles:
        return {403}
    if caller.is_stranger and row.everywhere:
        return {403}
    if caller.is_stranger and row.names and row.owner != "assignment":
        return {404}
    if caller.is_stranger and row.body is not None and "newcomer" in str(row.body(ids)):
        return {409}  # the name of a client of another project
    is_worker = caller.role == "worker"
    if any(ids[name] == world.nothing[name] for name in row.names) and (is_worker or row.owner != "assignment"):
        return {404}
    if is_worker and row.owner in ("broadcast", "assignment"):
        run = "real" if ids[row.names[0]] == world.real[row.names[0]] else "others"
        allowed = {"broadcast": {"real": "ab", "others": "c"}, "assignment": {"real": "a", "others": "c"}}
        if caller.name.removeprefix("worker ") not in allowed[row.owner][run]:
            return {404}
    if row.owner == "upload" and caller.authorization != f"Bearer {world.worker_token}":
        return {404}
    if row.owner == "assignment" and not is_worker:
        return {403, 422}  # only an update belongs to an assignment, and only workers send updates
    return row.answered


def _is_refused(world: World, row: Row, caller: Caller, ids: Ids) -> bool:
    expected = _expected(world, row, caller, ids)
    return bool(row.roles) and expected <= {401, 403, 404, 422} and expected != row.answered


def _different_ids(world: World, row: Row) -> list[Ids]:
    """Return the ids of real and of missing objects, or only the former if the operation names no object.

    Its requests would be equal.
    """
    if row.names or (row.body is not None and row.body(world.real) != row.body(world.nothing)):
        return [world.real, world.nothing]
    return [world.real]


def _refused(world: World, http: httpx.Client, name: str, caller: Caller, ids: Ids) -> httpx.Response:
    """Return the answer to a caller without permission, after checking its status and its content type."""
    answer = _ask(world, http, name, caller, ids)
    assert answer.status_code in _expected(world, TABLE[name], caller, ids), (name, caller.name, ids, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    return answer


def _masked(world: World, answer: httpx.Response) -> tuple[object, ...]:
    """Return the status of an answer, the names of its headers, and its text without ids and sizes.

    Headers that may differ between any two answers are left out.
    """
    text = answer.text
    for ids in (world.real, world.others, world.nothing):
        for value in ids.values():
            text = text.replace(value, "ID")
    names = sorted(name for name in answer.headers if name not in ("date", "content-length", "upload-expires"))
    return answer.status_code, tuple(names), re.sub(r"\d+ bytes", "N bytes", text)


def test_every_operation_has_a_row_with_the_roles_that_it_documents() -> None:
    assert set(TABLE) == set(OPERATIONS), "add the missing rows: who may call it, for whose objects, with which answer?"
    assert {name: row.roles for name, row in TABLE.items()} == {name: o.roles for name, o in OPERATIONS.items()}
    assert {name for name, row in TABLE.items() if not row.roles} == {f"GET {path}" for path in OPEN}


def test_callers_without_permission_learn_and_change_nothing(world: World) -> None:
    """An object that the caller may not see is answered like one that does not exist."""
    some = [caller for caller in world.callers if caller.role or caller.name in SOME_INVALID or examples(1) > 1]
    with ChangeWatcher(world.tables, world.coordinator.store).nothing_changes(), world.coordinator.bare_http() as http:
        for name, row in TABLE.items():
            for caller in some:
                answers = {
                    _masked(world, _refused(world, http, name, caller, ids))
                    for ids in _different_ids(world, row)
                    if _is_refused(world, row, caller, ids)
                }
                assert len(answers) <= 1, (name, caller.name, answers)


def test_a_worker_gets_only_its_own_work_and_ended_runs(world: World) -> None:
    ids = [world.real["run_id"], world.real["deleted"], world.others["run_id"]]
    with world.coordinator.bare_http() as http:
        for caller in (caller for caller in world.callers if caller.role == "worker"):
            headers = {"Authorization": str(caller.authorization)}
            assert http.post("/v1/work/ended-runs", json={"run_ids": ids}, headers=headers).json() == {"run_ids": []}
            claimed = http.post("/v1/work/claim", json={"wait_seconds": 0}, headers=headers)
            if claimed.status_code == 200:
                assert claimed.json()["client_id"] == caller.name.removeprefix("worker ")
        gone = world.coordinator.worker_token("gone")
        answer = http.post("/v1/work/ended-runs", json={"run_ids": ids}, headers={"Authorization": f"Bearer {gone}"})
    assert answer.json() == {"run_ids": [world.real["deleted"]]}


def test_random_calls_without_permission_get_the_answers_of_the_table(world: World) -> None:
    """The calls must not change anything."""
    drawn = random.Random(7)
    pools = {name: [world.real[name], world.others[name], world.nothing[name]] for name in world.real}
    with ChangeWatcher(world.tables, world.coordinator.store).nothing_changes(), world.coordinator.bare_http() as http:
        for _ in range(examples(60)):
            name = drawn.choice(list(TABLE))
            row, caller = TABLE[name], drawn.choice(world.callers)
            ids = {key: drawn.choice(pool) for key, pool in pools.items()}
            if _is_refused(world, row, caller, ids):
                _refused(world, http, name, caller, ids)


def test_permitted_callers_get_the_answers_of_the_table(world: World) -> None:
    """Operations are called in the order of the table, in which those that end other objects are last."""
    with world.coordinator.bare_http() as http:
        for name, row in TABLE.items():
            for caller in world.callers:
                if (row.roles and caller.role not in row.roles) or (not row.roles and caller.role is None):
                    continue
                ids = dict(world.real)
                if row.owner == "upload" and caller.name == "worker a":
                    ids["upload_id"] = world.begun(world.worker_token, world.real)
                expected = _expected(world, row, caller, ids)
                answer = _ask(world, http, name, caller, ids)
                assert answer.status_code in expected, (name, caller.name, answer.status_code, answer.text)


def test_every_role_is_permitted_by_some_operation() -> None:
    assert {role for row in TABLE.values() for role in row.roles} == {role.value for role in Role}
