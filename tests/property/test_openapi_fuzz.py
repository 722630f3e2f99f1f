"""Schemathesis with the API's own OpenAPI document, over a real socket and a real database.

No answer is a 5xx, and every answer has a status that its operation lists, a media type that this status has, and
the schema of both. Half of the requests name objects that exist, so that they pass the first check.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from support.coordinator import Coordinator
from support.data_sets import public_bytes, write_file
from support.evaluated_runs import add_embedding_map
from support.fuzzing import examples
from support.openapi import api_document, operations
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables


@dataclass(frozen=True)
class World:
    """A coordinator, and the ids of its objects."""

    coordinator: Coordinator
    ids: dict[str, str]


@pytest.fixture(scope="module")
def world(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, folder / "store", FEDSSL_CLAIM_WAIT_SECONDS="0") as running,
        Tables(url) as tables,
    ):
        scenario = Scenario(running, tables, folder, "ab", num_rounds=2)
        scenario.work("a", "b")
        scenario.advance()
        running.client.stop(scenario.id)  # otherwise its event stream would never end
        running.client.add_public_dataset("scans", write_file(folder, public_bytes()))
        evaluation_id = uuid4()
        add_embedding_map(tables, scenario.id, evaluation_id)
        ids = {"run_id": str(scenario.id), "client_id": "b", "digest": str(scenario.run.model), "name": "scans",
               "evaluation_id": str(evaluation_id)}  # fmt: skip
        yield World(running, ids)


@schemathesis.serializer("application/offset+octet-stream")
def _part_of_a_file(_: object, value: object) -> bytes:
    return value if isinstance(value, bytes) else repr(value).encode()


OPERATIONS = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(copy.deepcopy(api_document())).get_all_operations()
}
FUZZ = settings(
    max_examples=examples(2),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.generate,),  # a 5xx is shown as it came, because the world has changed since
)


UNLISTED = {405, 431}  # of a path and of a connection, not of an operation
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_as_documented(label: str, world: World) -> None:
    running = world.coordinator
    secret = running.worker_token("fuzz") if "/v1/work/" in label else running.admin_token
    listed = OPERATIONS[label].definition.raw["responses"]

    @FUZZ
    @given(case=OPERATIONS[label].as_strategy(), is_known=st.booleans())
    def ask(case: schemathesis.Case, is_known: bool) -> None:  # noqa: FBT001
        if is_known and case.path_parameters:
            case.path_parameters |= {name: world.ids[name] for name in case.path_parameters if name in world.ids}
        headers = {"Authorization": f"Bearer {secret}"}
        answer = case.call(base_url=running.url, headers=headers, timeout=30)
        case.validate_response(answer, checks=CHECKS)
        assert str(answer.status_code) in listed or answer.status_code in UNLISTED, answer.text
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == ["application/problem+json"]
            assert label.startswith("HEAD ") or answer.json()["status"] == answer.status_code

    ask()


def test_every_documented_operation_is_tested() -> None:
    assert set(OPERATIONS) == {f"{o.method} {o.template}" for o in operations(api_document())}
