"""Schemathesis on the API's own OpenAPI document, over a real socket and a real database: no answer is a 5xx."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from fedssl_coordinator.app import create_app
from support.cast import Cast
from support.coordinator import Coordinator
from support.fuzzing import examples
from support.servers import Servers
from support.tables import Tables

WORKERS = "/v1/work/"


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


schema = schemathesis.openapi.from_dict(create_app().openapi())


@schema.parametrize()
@settings(
    max_examples=examples(3),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.explicit, Phase.generate),  # a 5xx is shown as it came: the world has changed since
)
def test_no_operation_answers_with_a_5xx(case: schemathesis.Case, coordinator: Coordinator) -> None:
    token = coordinator.worker_token("fuzz") if case.path.startswith(WORKERS) else coordinator.admin_token
    answer = case.call(base_url=coordinator.url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
    case.validate_response(answer, checks=[not_a_server_error])
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == ["application/problem+json"]
        assert answer.json()["status"] == answer.status_code
