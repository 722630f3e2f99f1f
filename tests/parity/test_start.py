"""A run that starts from registered weights has the bits of a simulation that starts from their file."""

from pathlib import Path

import pytest
import torch

from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.deployed import assert_same_bits, train_to_end
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers
from support.weights import encoder_file

pytestmark = [pytest.mark.parity, pytest.mark.full]


def test_a_run_from_registered_weights_equals_its_simulation(servers: Servers, tmp_path: Path) -> None:
    """FedBYOL keeps a target network on each client, which must also start from the registered weights."""
    spec = method_spec("fedbyol", cohort={"min_clients": 3})
    file = encoder_file(tmp_path, EncoderConfig(widths=(8, 16)))
    values = spec.model_dump(mode="json")
    values["model"]["initial"] = {"weights": str(file)}
    clients = shards(spec)
    simulated = simulate(RunSpec.model_validate(values), clients)
    random = simulate(spec, clients).model
    assert any(not torch.equal(random[name], tensor) for name, tensor in simulated.model.items())
    values["model"]["initial"] = {"weights": "start"}
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", clients) as running,
    ):
        digest = running.client.add_weights("start", file).digest
        done = train_to_end(running, RunSpec.model_validate(values), clients, 100)
        running.client.download_model(done.id, tmp_path / "model.safetensors")
    assert simulated.spec.model.initial is not None
    assert done.spec.model.initial is not None
    assert simulated.spec.model.initial.digest == done.spec.model.initial.digest == digest
    assert_same_bits(tmp_path / "model.safetensors", simulated.model)
