"""Runs with different clients have the bits of their simulations: with an encoder that a worker declared, and
FedRLC's centers."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedssl.client import Conflict
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState
from fedssl.simulation import simulate
from support.deployed import assert_simulated, wait_until_completed
from support.methods import CONFIGS, PUBLIC, method_spec, shards
from support.processes import Federation, federation
from support.servers import Servers

pytestmark = [pytest.mark.parity, pytest.mark.full]

OWN = EncoderConfig(widths=(4, 12, 24))
DECLARATION = "{ name = 'convnet', widths = [4, 12, 24] }"
CLIENTS = ("client-0", "client-1", "client-2")
VICTIM = "client-1"


def _flesd(reducer: dict[str, Any], **changes: Any) -> RunSpec:
    method = {"name": "flesd", "reducer": {**CONFIGS["flesd"]["reducer"], "num_epochs": 2, **reducer}}
    sections = {"public_data": {**PUBLIC, "num_images": 72}, "cohort": {"clients": CLIENTS, "min_clients": 3}}
    return method_spec("flesd", method=method, **{**sections, **changes})


@pytest.fixture(scope="module")
def running(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a federation of three workers, one with an encoder that it has declared."""
    folder, clients = tmp_path_factory.mktemp("federation"), shards(method_spec("flesd"))
    with (
        servers.database() as database,
        federation(database, servers.redis_url, folder, clients) as started,
    ):
        for name in CLIENTS:
            started.start(name, **({"FEDSSL_WORKER_ENCODER": DECLARATION} if name == VICTIM else {}))
        started.wait_for(_registered(started, 3), "workers")
        yield started


def _registered(running: Federation, number: int) -> Callable[[], bool]:
    return lambda: sum(client.registered_at is not None for client in running.client.clients()) == number


def test_a_run_with_an_encoder_that_a_worker_declared_equals_its_simulation(running: Federation) -> None:
    """The run's spec has the encoder when it is created. The worker is killed in round 2, and keeps its network."""
    learning = {"client_encoders": "declared", "client_distillation": {"num_epochs": 3}}
    spec = _flesd(learning, num_rounds=2, training={"batch_size": 8, "local_epochs": 80})
    run = running.client.create_run(spec)
    config = distillation_of(run.spec.method)
    assert config is not None
    assert config.client_encoders == {VICTIM: OWN}
    assert running.client.client(VICTIM).encoder == OWN

    def in_mid_training() -> bool:
        current = running.client.run(run.id).current_round
        return current is not None and current.number == 2 and any(
            a.client_id == VICTIM
            and a.state == AssignmentState.LEASED
            and a.progress is not None
            and a.progress.phase == "training"
            for a in current.assignments
        )  # fmt: skip

    running.wait_for(in_mid_training, f"{VICTIM} training in round 2")
    running.kill(VICTIM, signal.SIGKILL)
    running.start(VICTIM, FEDSSL_WORKER_ENCODER=DECLARATION)
    simulated = simulate(run.spec, running.clients)
    assert simulated.client_states[VICTIM]["encoder.blocks.2.conv.weight"].shape == (24, 12, 3, 3)
    wait_until_completed(running, run.id)
    assert_simulated(running, run.id, simulated.model)


def test_a_run_with_centers_and_its_metric_of_used_centers_equal_their_simulation(running: Federation) -> None:
    """FedRLC's centers are uploaded with the weights, and a metric reports how many each client used."""
    spec = method_spec("fedrlc", num_rounds=3, cohort={"clients": CLIENTS, "min_clients": 3})
    run = running.client.create_run(spec)
    simulated = simulate(spec, running.clients)
    wait_until_completed(running, run.id)
    assert_simulated(running, run.id, simulated.model)
    found = {
        (metric.round_number, metric.client_id): metric.value
        for metric in running.client.metrics(run.id)
        if metric.name == "centers_used"
    }
    assert found == {
        (record.round_number, name): metrics["centers_used"]
        for record in simulated.history
        for name, metrics in record.clients.items()
    }
    assert len(found) == 9


def test_a_worker_with_another_encoder_than_the_run_gives_it_is_refused(running: Federation) -> None:
    spec = _flesd({"client_encoders": {"client-0": OWN.model_dump()}}, cohort={"clients": CLIENTS, "max_attempts": 1})
    words = "gives it the encoder convnet 8-16, and its worker has declared convnet 4-12-24"
    with pytest.raises(Conflict, match=f"{VICTIM}: the run {words}"):
        running.client.create_run(spec)
