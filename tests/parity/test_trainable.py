"""A run that trains a part of its encoder has the bits of its simulation, and sends only that part."""

from pathlib import Path

import pytest
import torch

from fedssl.models import load_encoder
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import CARD
from fedssl.simulation import simulate
from support.deployed import assert_planned_size, assert_same_bits, download_updates, train_to_end
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers
from support.weights import encoder_file, encoder_tensors

pytestmark = [pytest.mark.parity, pytest.mark.full]

ENCODER = EncoderConfig(widths=(8, 16))


def test_a_partly_frozen_run_equals_its_simulation_and_sends_less(servers: Servers, tmp_path: Path) -> None:
    """FedBYOL keeps a target network on each client, in which the same part is frozen."""
    file = encoder_file(tmp_path, ENCODER)
    values = method_spec("fedbyol", cohort={"min_clients": 3}).model_dump(mode="json")
    values["model"] |= {"initial": {"weights": str(file)}, "trainable": ["blocks.1.*"]}
    spec = RunSpec.model_validate(values)
    clients = shards(spec)
    simulated = simulate(spec, clients)
    values["model"]["initial"] = {"weights": "start"}
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", clients) as running,
    ):
        running.client.add_weights("start", file)
        done = train_to_end(running, RunSpec.model_validate(values), clients, 100)
        updates = download_updates(running, done, tmp_path)
        running.client.pull(done.id, tmp_path / "pulled")
    assert_same_bits(tmp_path / "pulled" / "model.safetensors", simulated.model)
    assert len(updates) == 6
    assert_planned_size(updates, spec)
    # The pulled encoder has all weights: the frozen ones are those of the registered file.
    pulled = load_encoder(tmp_path / "pulled").encoder.state_dict()
    for name, tensor in encoder_tensors(ENCODER).items():
        assert torch.equal(pulled[name.removeprefix("encoder.")], tensor) == name.startswith("encoder.blocks.0."), name
    assert "`blocks.1.*`; the rest has its initial values" in (tmp_path / "pulled" / CARD).read_text()
