"""Projects: people of one project cannot see what belongs to another."""

import base64
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from fedssl.client import ApiError, Client, Conflict, NotFound, Retry
from fedssl.client.errors import ClientError
from fedssl.protocol.projects import parse_grant
from fedssl.protocol.tokens import Role
from fedssl_coordinator.core import project_scope
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import Base
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard import session as sessions
from fedssl_coordinator.identity.openid.people import Person, person_of
from fedssl_coordinator.identity.tokens import service as tokens
from fedssl_coordinator.storage.uploads.expiry import expire_uploads
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes, write_file
from support.federation import deliver, tiny_spec
from support.pages import Browser
from support.tables import Tables
from support.tus import Tus
from support.uploads import digest as digest_of

_UNRESTRICTED = {
    "artifacts": "an endpoint asks whether something that the caller may see refers to one",
    "uploads": "belong to a worker's assignment",
    "partial_uploads": "belong to a token",
    "signing_keys": "are the coordinator's",
}


class Hearts:
    """A project, with a token for each role, and API clients of its admin and its operator."""

    def __init__(self, coordinator: Coordinator) -> None:
        coordinator.client.create_project("hearts")
        self.secrets = {
            role: coordinator.client.create_token(role, project="hearts").secret
            for role in ("admin", "operator", "viewer")
        }
        self.admin, self.operator = (
            Client(coordinator.url, self.secrets[role], retry=Retry(seconds=0)) for role in ("admin", "operator")
        )


@pytest.fixture
def hearts(coordinator: Coordinator) -> Iterator[Hearts]:
    hearts = Hearts(coordinator)
    with hearts.admin, hearts.operator:
        yield hearts


def test_every_table_is_restricted_to_projects_or_has_a_reason() -> None:
    restricted = {option.entity.local_table.name for option in project_scope._criteria("hearts")}  # type: ignore[attr-defined]
    assert restricted | _UNRESTRICTED.keys() == set(Base.metadata.tables)
    assert restricted.isdisjoint(_UNRESTRICTED)


def test_a_run_offers_work_only_to_clients_of_its_project(
    coordinator: Coordinator, hearts: Hearts, tmp_path: Path
) -> None:
    hearts.admin.create_token("worker", "h")
    ours, theirs = coordinator.worker("d"), coordinator.worker("h")
    with ours, theirs:
        assert [view.id for view in hearts.operator.clients()] == ["h"]
        run = hearts.operator.create_run(tiny_spec(cohort={"min_clients": 1}, num_rounds=1))
        assert (run.project, run.clients) == ("hearts", ["h"])
        coordinator.advance(run.id)
        assert ours.claim(0) is None
        item = theirs.claim(0)
        assert item is not None
        deliver(theirs, item, tmp_path, 1.0)
        coordinator.advance(run.id)
        finished = hearts.operator.run(run.id)
        assert finished.outcome == "completed"
        target = tmp_path / "model.safetensors"
        hearts.operator.download_model(run.id, target)
        hearts.operator.download_artifact(str(finished.model), target)
        default = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 2}))
        coordinator.advance(default.id)  # it waits: the client of the other project does not count
        assert "1 of 2" in str(coordinator.client.run(default.id).reason)
        with pytest.raises(NotFound):
            hearts.operator.run(default.id)
    assert [run.id for run in hearts.operator.runs()] == [finished.id]
    assert {run.id for run in coordinator.client.runs()} == {finished.id, default.id}


def test_a_run_cannot_name_the_clients_of_another_project(coordinator: Coordinator, hearts: Hearts) -> None:
    coordinator.client.create_token("worker", "d")
    spec = tiny_spec(cohort={"clients": ["d"], "min_clients": 1})
    with pytest.raises(Conflict, match="d: it belongs to the project default, and the run to hearts"):
        coordinator.client.create_run(spec, project="hearts")
    assert hearts.operator.create_run(spec).clients == []  # for this project, it is a client that may still register


def test_data_sets_belong_to_one_project(coordinator: Coordinator, hearts: Hearts, tmp_path: Path) -> None:
    file = write_file(tmp_path, labelled_bytes())
    coordinator.client.add_evaluation_dataset("scans", file)
    assert list(hearts.operator.evaluation_datasets()) == []
    with pytest.raises(Conflict, match="the name scans is taken"):
        hearts.operator.add_evaluation_dataset("scans", file)
    with pytest.raises(NotFound):
        hearts.operator.download_artifact(coordinator.client.evaluation_dataset("scans").digest, tmp_path / "stolen")
    assert hearts.operator.add_evaluation_dataset("hearts", file).project == "hearts"
    hearts.operator.download_artifact(coordinator.client.evaluation_dataset("hearts").digest, tmp_path / "own")
    judged = tiny_spec(evaluation={"dataset": "hearts"})
    with pytest.raises(ApiError, match="no evaluation data set hearts is registered"):
        coordinator.client.create_run(judged)  # of the default project
    hearts.operator.create_run(judged)
    public = coordinator.client.add_public_dataset("all", write_file(tmp_path, public_bytes()))
    with pytest.raises(ApiError, match="no public data set all is registered"):
        hearts.operator.create_run(tiny_spec(public_data={"dataset": "all", "num_images": 4, "digest": public.digest}))


def test_a_digest_gives_no_access_to_a_data_set_of_another_project(
    coordinator: Coordinator, hearts: Hearts, tmp_path: Path
) -> None:
    file = write_file(tmp_path, labelled_bytes())
    digest = coordinator.client.add_evaluation_dataset("scans", file).digest
    claim = {"name": "stolen", "digest": digest}
    length = str(file.stat().st_size)
    metadata = f"digest {base64.b64encode(digest.encode()).decode()}"
    tus = {"Tus-Resumable": "1.0.0", "Upload-Length": length, "Upload-Metadata": metadata}
    with coordinator.http(hearts.secrets["operator"]) as http:
        assert http.put(f"/v1/artifacts/{digest}", content=b"").status_code == 422
        assert http.post("/v1/uploads", headers=tus).headers["upload-offset"] == "0"
        for kind in ("public", "evaluation"):
            body = claim | ({"split": "test"} if kind == "public" else {})
            assert http.post(f"/v1/{kind}-datasets", json=body).status_code == 404
        assert http.get(f"/v1/artifacts/{digest}").status_code == 404
        answer = http.post("/v1/evaluation-datasets", json={"name": "scans", "digest": "0" * 64})
        assert answer.json()["detail"] == "the name scans is taken: choose another name"  # before the images are sent
        assert http.put(f"/v1/artifacts/{digest}", content=file.read_bytes()).status_code == 201
        assert http.put(f"/v1/artifacts/{digest}", content=b"").status_code == 200
        assert http.post("/v1/evaluation-datasets", json=claim).status_code == 201
        assert http.get(f"/v1/artifacts/{digest}").content == file.read_bytes()


def test_a_data_set_whose_upload_took_longer_than_a_day_is_kept(
    coordinator: Coordinator, hearts: Hearts, tables: Tables
) -> None:
    images = public_bytes()
    digest = digest_of(images)
    with Tus(coordinator, hearts.secrets["operator"]) as tus:
        location = tus.begin(len(images), digest)
        tus.send(location, images[:-1], 0)
        tables.execute("UPDATE partial_uploads SET created_at = now() - interval '30 hours'")
        assert tus.send(location, images[-1:], len(images) - 1).status_code == 204
    expire_uploads(datetime.now(UTC))
    with coordinator.http(hearts.secrets["operator"]) as http:
        claim = {"name": "slow", "digest": digest, "split": "train"}
        assert http.post("/v1/public-datasets", json=claim).status_code == 201


def test_each_project_whose_run_needs_a_damaged_file_is_notified(
    coordinator: Coordinator, hearts: Hearts, tmp_path: Path
) -> None:
    file = write_file(tmp_path, public_bytes())
    digest = coordinator.client.add_public_dataset("all", file).digest
    assert hearts.operator.add_public_dataset("same", file).digest == digest
    for client, name in ((coordinator.client, "all"), (hearts.operator, "same")):
        client.create_run(tiny_spec(public_data={"dataset": name, "num_images": 4}), start=False)
    hearts.admin.create_notification_destination("webhook", "https://hooks.example.org/hearts")
    coordinator.client.create_notification_destination("webhook", "https://hooks.example.org/", project="default")
    path = coordinator.store / digest[:2] / digest[2:4] / digest
    path.write_bytes(b"damaged")
    os.utime(path, (0, 0))  # a file that was written just now may be a backup that is being restored
    with pytest.raises(ClientError):
        hearts.operator.download_artifact(digest, tmp_path / "damaged")
    with Tables(coordinator.database_url) as tables:
        found = tables.query("SELECT payload -> 'data' ->> 'kind' FROM notification_deliveries")
    assert found == [("artifact.damaged",)] * 2


def test_tokens_and_clients_belong_to_the_project_of_the_person_who_creates_them(
    coordinator: Coordinator, hearts: Hearts
) -> None:
    created = hearts.admin.create_token("operator")
    assert created.project == "hearts"
    with pytest.raises(NotFound, match="no project default"):
        hearts.admin.create_token("admin", project="default")
    with pytest.raises(NotFound, match="no project lungs"):
        coordinator.client.create_token("viewer", project="lungs")
    coordinator.client.create_token("worker", "d")
    with pytest.raises(Conflict, match="the name d is taken"):
        hearts.operator.create_enrolment_token("d")
    with pytest.raises(Conflict, match="d belongs to the project default, not to hearts"):
        coordinator.client.create_enrolment_token("d", project="hearts")
    hearts.operator.create_enrolment_token("h")
    assert coordinator.client.client("h").project == "hearts"
    seen = {view.id for view in hearts.admin.tokens()}
    assert seen == {view.id for view in coordinator.client.tokens() if "hearts" in (view.project, view.label)} | {
        view.id for view in coordinator.client.tokens() if view.client_id == "h"
    }
    outsider = next(view for view in coordinator.client.tokens() if view.id not in seen)
    with pytest.raises(NotFound):
        hearts.admin.revoke_token(outsider.id)


def test_the_same_idempotency_key_in_two_projects_gives_two_runs(coordinator: Coordinator, hearts: Hearts) -> None:
    key = uuid4().hex
    first = coordinator.client.create_run(tiny_spec(), idempotency_key=key)
    second = hearts.operator.create_run(tiny_spec(seed=5), idempotency_key=key)
    assert first.id != second.id
    assert hearts.operator.create_run(tiny_spec(seed=5), idempotency_key=key).id == second.id


def test_people_of_a_project_are_notified_only_of_its_runs(coordinator: Coordinator, hearts: Hearts) -> None:
    own = hearts.admin.create_notification_destination("webhook", "https://hooks.example.org/hearts")
    everyones = coordinator.client.create_notification_destination("webhook", "https://hooks.example.org/")
    assert [view.id for view in hearts.admin.notification_destinations()] == [own.id]
    for client in (coordinator.client, hearts.operator):
        client.stop(client.create_run(tiny_spec(), start=False).id)
    with Tables(coordinator.database_url) as tables:
        found = tables.query("SELECT destination_id, count(*) FROM notification_deliveries GROUP BY 1")
    assert dict(found) == {own.id: 1, everyones.id: 2}


def test_the_pages_show_only_the_projects_own_data(coordinator: Coordinator, hearts: Hearts) -> None:
    coordinator.client.create_project("secret")  # an event about no run and no client
    coordinator.client.create_token("worker", "d")
    secret = coordinator.client.create_run(tiny_spec(name="secret"), start=False)
    shared = hearts.operator.create_run(tiny_spec(name="shared"), start=False)
    with Browser(coordinator, hearts.secrets["operator"]) as browser:
        runs = browser.get("/runs").text
        assert "shared" in runs
        for path in ("/runs", "/clients", "/events", "/public-data", "/runs/new", f"/compare?runs={secret.id}"):
            assert "secret" not in browser.get(path).text, path
        for path in ("", "/clients", "/events", "/files", "/spec", "/jobs", "/rounds", "/edit"):
            assert browser.get(f"/runs/{secret.id}{path}").status_code == 404, path
            assert browser.get(f"/runs/{shared.id}{path}").status_code == 200, path
        assert browser.get("/clients/d").status_code == 404
        assert browser.send(f"/runs/{secret.id}/edit", name="x").status_code == 404
        answer = browser.send("/runs/new", method="ssd", project="default")
        assert answer.status_code == 404
    waiting = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 1}), project="hearts")
    with coordinator.worker("e"), Browser(coordinator, coordinator.admin_token) as browser:
        assert "hearts" in browser.get("/runs").text
        assert "0 of 1 required client registered" in browser.get(f"/runs/{waiting.id}").text
        assert "<option>hearts</option>" in browser.get("/runs/new").text
        assert "<option selected>hearts</option>" in browser.get(f"/runs/new?from={waiting.id}").text


def test_event_streams_are_restricted_to_the_project(coordinator: Coordinator, hearts: Hearts) -> None:
    ours = coordinator.client.create_run(tiny_spec(), start=False)
    theirs = hearts.operator.create_run(tiny_spec(), start=False)
    with pytest.raises(NotFound):
        next(hearts.operator.events(ours.id))
    assert next(hearts.operator.events(theirs.id)).kind == "run.created"


def test_project_names_are_checked_and_only_global_admins_create_projects(
    coordinator: Coordinator, hearts: Hearts
) -> None:
    with coordinator.http() as http:
        for name in ("", "Hearts", "a b", "a--b", "-a", "x" * 64, "../x", "a:b"):
            assert http.post("/v1/projects", json={"name": name}).status_code == 422, name
        assert http.post("/v1/projects", json={"name": "hearts"}).status_code == 200
    with pytest.raises(ApiError, match="this needs a token for every project; yours is for hearts"):
        hearts.admin.create_project("lungs")
    assert [view.name for view in hearts.admin.projects()] == ["hearts"]
    coordinator.client.create_project("aorta")
    assert [view.name for view in coordinator.client.projects()] == ["aorta", "default", "hearts"]
    with coordinator.http() as http:
        first = http.get("/v1/projects", params={"limit": 2}).json()
        second = http.get("/v1/projects", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [view["name"] for view in (*first["items"], *second["items"])] == ["aorta", "default", "hearts"]
    assert second["next_cursor"] is None


@pytest.mark.parametrize(
    ("groups", "role", "memberships"),
    [
        (["all-viewers", "heart-team"], "viewer", {}),
        (["heart-team", "lung-admins", "heart-viewers"], None, {"hearts": "operator", "lungs": "admin"}),
        (["heart-viewers"], None, {"hearts": "viewer"}),
    ],
)
def test_groups_give_roles_in_projects(groups: list[str], role: str | None, memberships: dict[str, str]) -> None:
    grants = {"all-viewers": "viewer", "heart-team": "hearts:operator", "heart-viewers": "hearts:viewer",
              "lung-admins": "lungs:admin"}  # fmt: skip
    person = person_of({"sub": "1", "groups": groups}, "https://id.example.org", "groups", grants)
    assert (person.role, person.memberships) == (role, memberships)
    with pytest.raises(ProblemError, match="you have no role here"):
        person_of({"sub": "1", "groups": ["others"]}, "https://id.example.org", "groups", grants)
    assert parse_grant("viewer") == (None, "viewer")


def test_only_a_request_can_be_restricted_to_a_project() -> None:
    project_scope.restrict(None)
    with pytest.raises(RuntimeError):
        project_scope.restrict("hearts")
    assert project_scope.restricted_to() is None


def test_a_person_works_in_one_of_their_projects_at_a_time(coordinator: Coordinator, hearts: Hearts) -> None:
    coordinator.client.create_project("lungs")
    hearts.operator.create_run(tiny_spec(name="beating"), start=False)
    both = {"lungs": Role.VIEWER, "hearts": Role.OPERATOR}
    with transaction() as session:
        token = tokens.sign_in(session, Person("https://id.example.org 1", "Ada", None, both), 60)
        cookie = sessions.cookie_of(session, token)
    with Browser(coordinator, None) as browser:
        browser.http.cookies.set(sessions.COOKIE, cookie)
        assert "beating" in browser.get("/runs").text
        assert browser.get("/runs/new").status_code == 200
        form = {"method": "ssd", "project": "hearts"}
        assert '<input type="hidden" name="project" value="hearts">' in browser.get("/runs/new").text
        assert browser.send("/project", project="lungs").status_code == 303
        answer = browser.send("/runs/new/check", **form)  # from a page that was opened before the change
        assert (answer.status_code, "you work in lungs now" in answer.text) == (409, True)
        assert "beating" not in browser.get("/runs").text
        assert browser.get("/runs/new").status_code == 403
        assert browser.send("/project", project="default").status_code == 404
    unknown = Person("https://id.example.org 2", "Bea", None, {"kidneys": Role.ADMIN})
    with pytest.raises(ProblemError, match="no project kidneys"), transaction() as session:
        tokens.sign_in(session, unknown, 60)
