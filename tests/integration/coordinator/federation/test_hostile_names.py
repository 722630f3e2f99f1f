"""Text that looks like code: SQL, markup, paths, and letters of every script. It is kept as text, or refused."""

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from fedssl.artifacts.tensors import serialised
from fedssl.client import Conflict
from fedssl.protocol.views import RunView
from support.coordinator import Coordinator
from support.federation import tensors_for, upload
from support.scenario import Scenario
from support.tables import Tables

NAMES = [
    "'; DROP TABLE tokens; --", "1 OR 1=1", "%' OR name LIKE '%", "$1", "%s", "{0.__class__}",
    "<script>alert(1)</script>",
    "../../etc/passwd", "=cmd|' /C calc'!A0", "\u202egnp.exe", "e\u0301\u0301", "\U0001f642", "\u0660\u0661", "İı",
    "\ufeff",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_hostile_text_is_stored_as_text_or_refused(shared_coordinator: Coordinator, name: str) -> None:
    made = shared_coordinator.client.create_token("viewer", label=name)
    assert next(token.label for token in shared_coordinator.client.tokens() if token.id == made.id) == name
    place = quote(name, safe="")
    with shared_coordinator.http() as http:
        for path in (
            f"/v1/clients/{place}",
            f"/v1/methods/{place}",
            f"/v1/public-datasets/{place}",
            f"/v1/runs/{place}",
        ):
            assert http.get(path).status_code in (404, 422)
        for query in ("kind", "cursor", "limit"):
            answer = http.get("/v1/runs", params={query: name})
            assert answer.status_code in (200, 422)
        assert http.post("/v1/runs", json={"spec": {"name": name}, "start": False}).status_code in (201, 422)
        assert http.post("/v1/tokens", json={"role": "worker", "client_id": name}).status_code == 422
    assert shared_coordinator.client.ready().status == "ok"


def test_the_uploads_of_one_assignment_are_limited(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """One upload is submitted. A worker that was killed before that may send others, but only a limited number."""
    scenario = Scenario(coordinator, tables, tmp_path)
    item, worker = scenario.claim("a"), scenario.workers["a"]
    digests = [upload(worker, item, tensors_for(item.plan.update, float(value)), tmp_path) for value in range(16)]
    with pytest.raises(Conflict, match="16 different artifacts were sent"):
        upload(worker, item, tensors_for(item.plan.update, 99.0), tmp_path)
    assert upload(worker, item, tensors_for(item.plan.update, 0.0), tmp_path) == digests[0]  # not counted again
    scenario.deliver("a", 15.0)
    run: RunView = scenario.run
    assert run.state == "running"


def test_concurrent_uploads_are_limited_too(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """Each upload was counted when it began, before any of the others had arrived."""
    scenario = Scenario(coordinator, tables, tmp_path)
    item = scenario.claim("a")
    secret = scenario.workers["a"]._connection._http.headers["Authorization"].removeprefix("Bearer ")
    files = [serialised(tensors_for(item.plan.update, float(value))) for value in range(24)]
    have_begun = threading.Barrier(len(files))

    def put(content: bytes) -> int:
        def parts() -> Iterator[bytes]:
            yield content[:-1]
            have_begun.wait(20)
            time.sleep(0.5)  # until the coordinator has checked the assignment of each
            yield content[-1:]

        path = f"/v1/artifacts/{hashlib.sha256(content).hexdigest()}?assignment={item.assignment_id}"
        with coordinator.http(secret) as http:
            headers = {"Content-Length": str(len(content))}
            return http.put(path, content=parts(), headers=headers).status_code

    with ThreadPoolExecutor(len(files)) as pool:
        statuses = list(pool.map(put, files))
    assert sorted(statuses) == [201] * 16 + [409] * 8
    assert tables.one("SELECT count(*) FROM uploads") == 16
    scenario.deliver("a", float(statuses.index(201)))
