"""A deployed run with rounded updates: the clients keep their rounding errors, and the bits are the simulation's."""

from pathlib import Path

import pytest
import torch

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import serialised
from fedssl.methods import METHODS
from fedssl.simulation import simulate
from support.agents import LOST, Workers
from support.coordinator import Coordinator
from support.methods import method_spec, shards

pytestmark = pytest.mark.integration


@pytest.mark.full
def test_a_run_has_the_bits_of_its_simulation_after_a_restart_and_a_lost_error(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    spec = method_spec("fedsimclr", num_rounds=3, upload={"dtype": "bfloat16"})
    workers = Workers(coordinator, tmp_path, spec)
    workers.train()
    errors = workers.state("client-0")
    assert all(name.startswith("upload_error.") for name in errors)
    assert all(bool(tensor.any()) for name, tensor in errors.items() if name.endswith("conv.weight"))
    for name in workers.agents:
        workers.restart(name)
    workers.train()
    workers.damage_state(how="removed")
    workers.train()
    result = simulate(spec, shards(spec), lost_states={3: [LOST]})
    workers.assert_simulated(result)
    assert len(workers.events("client.state_lost")) == 1
    own = result.client_states["client-0"]
    assert all(torch.equal(tensor, own[name]) for name, tensor in workers.state("client-0").items())
    plan = METHODS["fedsimclr"].bind(spec).plan
    rounds = list(coordinator.client.rounds(workers.id))
    updates = [coordinator.tensors(part.update) for view in rounds for part in view.assignments if part.update]
    assert len(updates) == 3 * 3
    assert {len(serialised(update)) for update in updates} == {file_bytes(plan.update)}
