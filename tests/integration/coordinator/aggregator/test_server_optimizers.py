"""A deployed run with a server optimizer and an averaged encoder has the bits of its simulation, also after it was
continued."""

from pathlib import Path

import pytest
import torch

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
    aggregation = {"server_optimizer": OPTIMIZERS[name], "encoder_average": {"decay": 0.5}}
    workers = Workers(coordinator, tmp_path, method_spec("fedsimclr", num_rounds=2, aggregation=aggregation))
    workers.train()
    workers.train()
    coordinator.client.continue_run(workers.id, 3)
    coordinator.advance(workers.id)
    workers.train()
    whole = method_spec("fedsimclr", num_rounds=3, aggregation=aggregation)
    result = simulate(whole, shards(whole))
    workers.assert_simulated(result)
    run = coordinator.client.run(workers.id)
    rounds = list(coordinator.client.rounds(workers.id))
    last = coordinator.tensors(rounds[-1].broadcast)
    assert run.model != rounds[-1].broadcast
    assert run.initial_model is not None
    assert coordinator.tensors(run.initial_model).keys() == last.keys() == result.model.keys()
    # The average after the second round is what is evaluated, and what another run can start from.
    second = simulate(method_spec("fedsimclr", num_rounds=2, aggregation=aggregation), shards(whole)).model
    start = {"run": str(workers.id), "round": 2}
    model = {**whole.model.model_dump(mode="json"), "initial": start}
    other = coordinator.client.create_run(method_spec("fedsimclr", model=model))
    assert other.spec.model.initial is not None
    assert other.spec.model.initial.digest is not None
    started = coordinator.tensors(other.spec.model.initial.digest)
    assert all(torch.equal(started[name], tensor) for name, tensor in second.items())
    assert not torch.equal(last["encoder.blocks.0.conv.weight"], second["encoder.blocks.0.conv.weight"])
