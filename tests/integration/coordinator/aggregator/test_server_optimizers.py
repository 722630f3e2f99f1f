"""A deployed run with an optimiser on the coordinator has the bits of its simulation, also after it was continued."""

from pathlib import Path

import pytest

from fedssl.simulation import simulate
from support.agents import Workers
from support.coordinator import Coordinator
from support.methods import method_spec, shards
from support.tables import Tables

pytestmark = pytest.mark.integration

OPTIMIZERS = {
    "fedavgm": {"name": "fedavgm", "learning_rate": 1.0},
    "fedadam": {"name": "fedadam", "learning_rate": 0.01},
}


@pytest.mark.parametrize("name", ["fedadam", pytest.param("fedavgm", marks=pytest.mark.full)])
def test_a_deployed_run_has_the_bits_of_its_simulation(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, name: str
) -> None:
    aggregation = {"server_optimizer": OPTIMIZERS[name]}
    workers = Workers(coordinator, tmp_path, method_spec("fedsimclr", num_rounds=2, aggregation=aggregation))
    workers.train()
    workers.train()
    coordinator.client.continue_run(workers.id, 3)
    coordinator.advance(workers.id)
    workers.train()
    whole = method_spec("fedsimclr", num_rounds=3, aggregation=aggregation)
    workers.assert_simulated(simulate(whole, shards(whole)))
