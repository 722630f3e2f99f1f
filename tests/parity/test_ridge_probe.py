"""The probe over all sites has the same bits in a simulation and in a federation of real processes."""

from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.data.partitioning import partition_dataset
from fedssl.protocol.states import RunState
from fedssl.simulation import simulate
from support.methods import method_spec
from support.processes import federation
from support.servers import Servers

pytestmark = pytest.mark.parity


@pytest.mark.full
def test_the_sites_sums_give_the_simulations_classifier(servers: Servers, tmp_path: Path) -> None:
    """One of three sites has no labels: it declines, and the others finish the run."""
    spec = method_spec(
        "ridge-probe",
        cohort={"min_clients": 3, "min_updates": 2, "lease_seconds": 30},
        partition={"dataset": "digits", "num_clients": 3, "alpha": 1.0},
    )
    assert spec.partition is not None
    shards = partition_dataset(spec.partition, spec.data).by_client
    *labelled, unlabelled = sorted(shards)
    simulated = simulate(spec, shards, cohorts={1: labelled, 2: labelled})
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", shards) as running,
    ):
        run = running.client.create_run(spec)
        for name in shards:
            running.start(name, **({} if name == unlabelled else {"FEDSSL_WORKER_LABELS": "own"}))
        running.wait_for(lambda: running.client.run(run.id).state == RunState.FINISHED, "the run's end", 150)
        found = tmp_path / "model.safetensors"
        running.client.download_model(run.id, found)
    model = load_tensors(found)
    assert model.keys() == simulated.model.keys()
    assert all(torch.equal(model[name], simulated.model[name]) for name in model)
    assert simulated.history[1].server["held_out_accuracy"] > 0.5
