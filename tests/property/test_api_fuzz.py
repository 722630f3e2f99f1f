"""Unusual values in every part of every operation: the answer is never a 5xx, and an error is always a problem."""

import base64
import copy
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.work import DELIVERY_HEADER
from support.coordinator import Coordinator
from support.openapi import Operation, api_document, operations
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables

OPERATIONS = operations(api_document())
ODD_TEXT = ["", " ", ".", "..", "../..", "\x00", "\n", "é", "٣", "\u202e", "%", "%00", "null", "-1", "0", "1e999",
            "NaN", "true", "x" * 300, "9" * 30, "0" * 64, "f" * 63, "bytes=0-", "bytes=9-1", 'W/"x"',
            "🙂"]  # fmt: skip
odd_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(ODD_TEXT)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ODD_TEXT, "spec", "name"]), inner, max_size=3)
    ),
    max_leaves=8,
)


class World:
    """Objects that exist, so that requests pass the first checks."""

    def __init__(self, coordinator: Coordinator, scenario: Scenario) -> None:
        self.coordinator = coordinator
        self.ids: dict[str, list[str]] = {
            "run_id": [str(scenario.id)],
            "token_id": [str(coordinator.client.create_token("operator").id)],
            "client_id": ["b"],  # `a` is needed: a revoked client gets no more work
            "digest": [str(scenario.run.model), str(scenario.run.initial_model)],
            "assignment": [str(scenario.item("a").assignment_id)],
            "name": ["fedsimclr"],
            "Tus-Resumable": ["1.0.0"],
            "Upload-Length": ["1000"],
            "Upload-Offset": ["0"],
            "Upload-Metadata": [f"digest {base64.b64encode(b'0' * 64).decode()}"],
        }
        self.tokens = {
            "admin": coordinator.admin_token,
            "operator": coordinator.operator_token,
            "worker": coordinator.worker_token("a"),
            "enrolment": coordinator.client.create_enrolment_token("c").secret,
        }
        self.ids["upload_id"] = [_begun(coordinator, self.ids)]
        assignment = self.ids["assignment"][0]
        self.bodies: dict[str, Any] = {
            "POST /v1/runs": {"spec": RunSpec(name="fuzz").model_dump(mode="json"), "start": False},
            "POST /v1/tokens": {"role": "worker", "client_id": "a", "label": "fuzz", "lifetime_seconds": 9},
            "POST /v1/enrolment-tokens": {"client_id": "d", "label": "fuzz", "lifetime_seconds": 9},
            "POST /v1/enrolments": {"token_hash": "0" * 64},
            "POST /v1/public-datasets": {"name": "fuzz", "digest": "0" * 64, "split": "test"},
            "POST /v1/evaluation-datasets": {"name": "fuzz", "digest": "0" * 64},
            "POST /v1/weights": {"name": "fuzz", "digest": "0" * 64, "family": "fedssl", "source_digest": "0" * 64},
            "POST /v1/work/register": {"worker_version": "1", "methods": {"fedsimclr": 1}, "device": "cpu",
                                       "num_images": 9, "channels": 1, "image_size": 8,
                                       "policy": {"digest": "0" * 64, "allow": [
                                           {"artifact": "weights", "methods": ["fed*"], "tensors": ["encoder.*"]}]}},
            "POST /v1/work/claim": {"wait_seconds": 0},
            "POST /v1/work/heartbeat": {
                "assignment_id": assignment,
                "anchor": {"key": "0" * 64, "seq": 1, "head": "0" * 64},
                "progress": {"phase": "training", "epoch": 1, "num_epochs": 1, "step": 1, "num_steps": 2, "loss": 0.5},
            },
            "POST /v1/work/submit": {"assignment_id": assignment, "update": "0" * 64, "num_examples": 5,
                                     "metrics": {"loss": 1.0}},
            "POST /v1/work/decline": {"assignment_id": assignment, "reason": "no"},
        }  # fmt: skip
        self.ids[DELIVERY_HEADER] = [json.dumps(self.bodies["POST /v1/work/submit"])]


def _begun(coordinator: Coordinator, known: dict[str, list[str]]) -> str:
    """Begin an upload as the admin, send none of its bytes, and return its id."""
    headers = {name: known[name][0] for name in ("Tus-Resumable", "Upload-Length", "Upload-Metadata")}
    with coordinator.http() as http:
        return http.post("/v1/uploads", headers=headers).headers["location"].rpartition("/")[2]


@pytest.fixture(scope="module")
def world(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fuzz")
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, folder / "store", FEDSSL_CLAIM_WAIT_SECONDS="0") as running,
        Tables(url) as tables,
    ):
        scenario = Scenario(running, tables, folder, "ab", num_rounds=2)
        scenario.work("a", value=1.0)
        scenario.work("b", value=2.0)
        scenario.advance()
        scenario.claim("a")
        # The run is finished, because otherwise its event stream would never end.
        running.client.stop(scenario.id)
        yield World(running, scenario)


def _mutated(draw: st.DrawFn, value: Any) -> Any:
    """Return a copy of a JSON document with one value replaced, removed or added."""
    root = {"root": copy.deepcopy(value)}
    holder: Any = root
    key: Any = "root"
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.booleans()):
        holder = holder[key]
        key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
        case "remove" if isinstance(holder, dict) and holder is not root:
            del holder[key]
        case "add" if isinstance(holder[key], dict):
            holder[key][draw(st.sampled_from(ODD_TEXT))] = draw(odd_json)
        case _:
            holder[key] = draw(odd_json)
    return root.get("root")


@st.composite
def requests(draw: st.DrawFn, world: World, among: list[Operation]) -> tuple[Operation, httpx.Request]:
    operation = draw(st.sampled_from(among))
    parameters = operation.document.get("parameters", [])
    places: dict[str, dict[str, str]] = {"path": {}, "query": {}, "header": {}}
    for parameter in (p for p in parameters if p["name"] != "content-length"):
        known = world.ids.get(parameter["name"], []) * 8 + (["latest"] if parameter["name"] == "which" else [])
        if parameter["in"] == "path" or draw(st.booleans()):
            places[parameter["in"]][parameter["name"]] = draw(st.sampled_from([*known, str(UUID(int=7)), *ODD_TEXT]))
    path = operation.template.format(**{name: quote(value, safe="") for name, value in places["path"].items()})
    role = draw(st.sampled_from(sorted(world.tokens)))
    if draw(st.integers(0, 9)):  # usually a permitted role
        may = operation.roles & set(world.tokens)
        role = "worker" if operation.method == "PUT" else draw(st.sampled_from(sorted(may))) if may else role
    headers = {name: value.encode("utf-8") for name, value in places["header"].items() if _can_be_sent(value)}
    headers["Authorization"] = f"Bearer {world.tokens[role]}".encode()
    content = b""
    if (example := world.bodies.get(f"{operation.method} {operation.template}")) is not None:
        headers["Content-Type"] = draw(
            st.sampled_from(["application/json"] * 8 + ["text/plain", "application/x+json"])
        ).encode()
        content = json.dumps(_mutated(draw, example)).encode()
        if draw(st.integers(0, 9)) == 0:
            cut = draw(st.integers(0, len(content)))
            content = content[:cut] + draw(st.binary(max_size=5)) + content[cut:]
    elif operation.method in ("PUT", "PATCH"):
        headers["Content-Type"] = b"application/offset+octet-stream"
        content = draw(st.binary(max_size=50))
    if operation.method == "GET" and draw(st.booleans()):
        headers["Range"] = draw(st.sampled_from(["bytes=0-", "bytes=-1", "bytes=5-2", "bytes=99999999-", "x"])).encode()
    url = httpx.URL(world.coordinator.url + path, params=places["query"])
    return operation, httpx.Request(operation.method, url, headers=headers, content=content)


def _can_be_sent(value: str) -> bool:
    return value.isprintable() and value == value.strip() and value != ""


FUZZ = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.generate,),  # every example changes the world a little, so none can be shrunk
)


def _fuzz(world: World, http: httpx.Client, answers: list[tuple[str, int]], among: list[Operation], num: int) -> None:
    @settings(FUZZ, max_examples=num)
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        operation, request = data.draw(requests(world, among))
        answer = http.send(request)
        answers.append((str(operation), answer.status_code))
        assert answer.status_code < 500, (request.method, str(request.url), request.content[:500], answer.text)
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json", answer.text
        if answer.status_code >= 400 and request.method != "HEAD":
            assert answer.json()["status"] == answer.status_code
            assert answer.json()["detail"]

    one()


@pytest.mark.full
def test_no_request_is_answered_with_a_5xx(world: World) -> None:
    answers: list[tuple[str, int]] = []
    with world.coordinator.bare_http() as http:
        _fuzz(world, http, answers, OPERATIONS, 300)
        # An operation may not have been drawn above, so each gets a few requests here.
        for operation in OPERATIONS:
            _fuzz(world, http, answers, [operation], 5)
    assert {name for name, _ in answers} == {str(operation) for operation in OPERATIONS}
    statuses = {status for _, status in answers}
    assert {200, 404, 422} <= statuses  # some requests passed all checks
    assert world.coordinator.client.ready().status == "ok"
