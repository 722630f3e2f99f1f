"""A run that trains adapters has the bits of its simulation, sends only them and the heads, and is pulled merged."""

from pathlib import Path

import pytest
import torch

from fedssl.client.model_card import CARD
from fedssl.models import load_encoder, merged
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.deployed import assert_planned_size, assert_same_bits, download_updates, train_to_end
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers

pytestmark = [pytest.mark.parity, pytest.mark.full]


def test_a_run_of_adapters_equals_its_simulation_and_sends_only_them(servers: Servers, tmp_path: Path) -> None:
    spec = method_spec("fedbyol", cohort={"min_clients": 3})
    values = spec.model_dump(mode="json")
    values["model"] |= {"encoder": {"name": "vit-tiny", "patch_size": 8, "depth": 2}, "lora": {"rank": 2, "alpha": 4}}
    values["training"] = {"batch_size": 16, "optimizer": {"name": "adamw", "learning_rate": 1e-3}}
    values["partition"]["max_images"] = 96
    spec = RunSpec.model_validate(values)
    clients = shards(spec)
    simulated = simulate(spec, clients)
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", clients) as running,
    ):
        done = train_to_end(running, spec, clients, 150)
        updates = download_updates(running, done, tmp_path)
        running.client.pull(done.id, tmp_path / "pulled")
    assert_same_bits(tmp_path / "pulled" / "model.safetensors", simulated.model)
    assert len(updates) == 6
    assert_planned_size(updates, spec)
    pulled = load_encoder(tmp_path / "pulled").encoder.state_dict()
    expected = merged({name: each for name, each in simulated.model.items() if name.startswith("encoder.")})
    assert {f"encoder.{name}" for name in pulled} == expected.keys()
    assert all(torch.equal(tensor, expected[f"encoder.{name}"]) for name, tensor in pulled.items())
    assert "adapters of rank 2 of `blocks.*.attn.*`" in (tmp_path / "pulled" / CARD).read_text()
