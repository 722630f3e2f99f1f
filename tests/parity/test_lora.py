"""A run that trains adapters gives the bits of its simulation, sends only these and the heads, and is pulled merged."""

from pathlib import Path

import pytest
import torch

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import load_tensors
from fedssl.client.model_card import CARD
from fedssl.methods import METHODS
from fedssl.models import load_encoder, merged
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import RunView
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers

pytestmark = [pytest.mark.parity, pytest.mark.full]


def test_a_run_of_adapters_equals_its_simulation_and_sends_only_them(servers: Servers, tmp_path: Path) -> None:
    spec = method_spec("fedbyol", cohort={"min_clients": 3})
    values = spec.model_dump(mode="json")
    values["model"] |= {"encoder": {"name": "vit-tiny", "patch_size": 8}, "lora": {"rank": 2, "alpha": 4}}
    values["training"] = {"batch_size": 16, "optimizer": {"name": "adamw", "learning_rate": 1e-3}}
    values["partition"]["max_images"] = 96
    spec = RunSpec.model_validate(values)
    clients = shards(spec)
    simulated = simulate(spec, clients)
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", clients) as running,
    ):
        for name in clients:
            running.start(name)
        created = running.client.create_run(spec)

        def look() -> RunView | None:
            run = running.client.run(created.id)
            return run if run.state is RunState.FINISHED else None

        done = running.wait_for(look, "the run's end", 150)
        assert done.outcome is Outcome.COMPLETED, done.reason
        updates = [a.update for view in running.client.rounds(created.id) for a in view.assignments if a.update]
        for number, digest in enumerate(updates):
            running.client.download_artifact(digest, tmp_path / f"update-{number}")
        running.client.pull(created.id, tmp_path / "pulled")
    deployed = load_tensors(tmp_path / "pulled" / "model.safetensors")
    assert deployed.keys() == simulated.model.keys()
    assert [name for name in deployed if not torch.equal(deployed[name], simulated.model[name])] == []
    plan = METHODS["fedbyol"].bind(spec).plan
    assert len(updates) == 6
    assert {(tmp_path / f"update-{number}").stat().st_size for number in range(6)} == {file_bytes(plan.update)}
    pulled = load_encoder(tmp_path / "pulled").encoder.state_dict()
    expected = merged({name: each for name, each in simulated.model.items() if name.startswith("encoder.")})
    assert {f"encoder.{name}" for name in pulled} == expected.keys()
    assert all(torch.equal(tensor, expected[f"encoder.{name}"]) for name, tensor in pulled.items())
    assert "adapters of rank 2 of `blocks.*.attn.*`" in (tmp_path / "pulled" / CARD).read_text()
