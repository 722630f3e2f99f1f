"""Schemathesis on the API's own OpenAPI document, over a real socket and a real database: no answer is a 5xx."""

import copy
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from support.cast import Cast
from support.coordinator import Coordinator
from support.fuzzing import examples
from support.openapi import api_document, operations
from support.servers import Servers
from support.tables import Tables


@pytest.fixture(scope="module")
def coordinator(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, folder / "store", FEDSSL_CLAIM_WAIT_SECONDS="0") as running,
        Tables(url) as tables,
    ):
        cast = Cast(running, tables, folder, "ab", num_rounds=2)
        cast.work("a", "b")
        cast.advance()
        running.client.stop(cast.id)  # or its event stream would go on for ever
        yield running


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
    phases=(Phase.generate,),  # a 5xx is shown as it came: the world has changed since
)


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_operation_answers_with_a_5xx(label: str, coordinator: Coordinator) -> None:
    secret = coordinator.worker_token("fuzz") if "/v1/work/" in label else coordinator.admin_token

    @FUZZ
    @given(case=OPERATIONS[label].as_strategy())
    def ask(case: schemathesis.Case) -> None:
        headers = {"Authorization": f"Bearer {secret}"}
        answer = case.call(base_url=coordinator.url, headers=headers, timeout=30)
        case.validate_response(answer, checks=[not_a_server_error])
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == ["application/problem+json"]
            assert label.startswith("HEAD ") or answer.json()["status"] == answer.status_code

    ask()


def test_every_documented_operation_is_asked() -> None:
    assert set(OPERATIONS) == {f"{o.method} {o.template}" for o in operations(api_document())}
