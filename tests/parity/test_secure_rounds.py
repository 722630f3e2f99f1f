"""A simulation, a run in plain fixed point and a run with masks have equal bits, even if a worker is killed."""

import signal
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.deployed import assert_simulated, wait_until_completed
from support.methods import ALL_METHODS, method_spec, shards
from support.processes import Federation, federation
from support.servers import Servers

pytestmark = pytest.mark.parity

FIXED: dict[str, Any] = {
    "aggregation": {"arithmetic": "fixed", "matrix_bits": 32},  # in the second round
    "partition": {"dataset": "digits", "num_clients": 4, "alpha": 1.0, "max_images": 200},
    "cohort": {"min_clients": 4, "lease_seconds": 30},
}
SECURE: dict[str, Any] = {"secure_aggregation": {"min_cohort": 3, "collusion": 0, "phase_seconds": 30}}
VICTIM = "client-2"


def _spec(name: str, **changes: Any) -> RunSpec:
    usual = method_spec(name, num_rounds=2, **{**FIXED, **changes})
    method = {**usual.method.model_dump(), **CONFIGS.get(name, {})}
    return RunSpec.model_validate({**usual.model_dump(), "method": method})


@pytest.fixture(scope="module")
def four_workers(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    with (
        servers.database() as database,
        federation(database, servers.redis_url, folder, shards(_spec("fedbyol"))) as running,
    ):
        for name in running.clients:
            running.start(name, FEDSSL_WORKER_LABELS="own")
        running.wait_for(lambda: sum(c.registered_at is not None for c in running.client.clients()) == 4, "workers")
        yield running


def _begin(running: Federation, spec: RunSpec, *, kills: bool = False) -> UUID:
    """Start a run. With `kills`, one worker is killed in the first round after it has sent its masked vector."""
    created = running.client.create_run(spec)

    def has_sent() -> bool:
        events = running.client.event_log(created.id, "secure_round.phase")
        return any(event.data["phase"] == "confirmations" for event in events)

    if kills:
        running.wait_for(has_sent, "the vectors")
        running.kill(VICTIM, signal.SIGKILL)
        running.start(VICTIM, FEDSSL_WORKER_LABELS="own")
    return created.id


def _completed(running: Federation, run_id: UUID) -> None:
    """Wait until a run has been trained, with the updates of all clients in each round."""
    done = wait_until_completed(running, run_id, 90)
    assert [view.verdict for view in running.client.rounds(run_id)] == ["aggregated"] * done.num_rounds


METHODS = sorted(
    (name for name in ALL_METHODS if method_spec(name).method.why_not_secure is None),
    key=lambda name: name != "fedbyol",  # fedbyol also has a worker killed, and is the only method without --full
)
"""All that can have secure aggregation: weights with and without what stays at the clients, control variates, the
centers of DINO and FedRLC, transformers with fixed tables, scaled tensors, centroids next to the sum, the probe."""

CONFIGS: dict[str, dict[str, Any]] = {
    "ldawa": {"reducer": {"name": "ldawa", "num_plain_rounds": 1}},
    "ridge-probe": {"min_images": 1},
}
"""The settings without which a run of two rounds would not have the kind of sum that the method is in the list for."""


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_masks_has_the_same_bits_as_without(name: str, four_workers: Federation) -> None:
    spec = _spec(name)
    simulated = simulate(spec, shards(spec))
    runs = [
        _begin(four_workers, _spec(name, **SECURE), kills=name == "fedbyol"),
        _begin(four_workers, spec),  # the workers train for both runs at the same time
    ]
    for run_id in runs:
        _completed(four_workers, run_id)
        assert_simulated(four_workers, run_id, simulated.model)
