"""The probe over all sites, and the classifier that the sites train from it, have the bits of their simulations."""

from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.data.partitioning import partition_dataset
from fedssl.models.classifier import BIAS, WEIGHT
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl.simulation import simulate
from support.methods import method_spec
from support.processes import federation
from support.servers import Servers

pytestmark = pytest.mark.parity


@pytest.mark.full
def test_the_sites_sums_give_the_simulations_classifier(servers: Servers, tmp_path: Path) -> None:
    """One of three sites has no labels: it is left out."""
    spec = method_spec(
        "ridge-probe",
        cohort={"min_clients": 2, "lease_seconds": 30},
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
        trained = running.client.create_run(_classifier(spec, {"run": str(run.id)}))
        running.wait_for(lambda: running.client.run(trained.id).state == RunState.FINISHED, "the classifier", 150)
        fine_tuned = tmp_path / "classifier.safetensors"
        running.client.download_model(trained.id, fine_tuned)
        [start] = [event.message for event in running.client.event_log(trained.id) if "classifier of" in event.message]
        assert "its classifier of 10 classes" in start
    model = load_tensors(found)
    assert model.keys() == simulated.model.keys()
    assert all(torch.equal(model[name], simulated.model[name]) for name in model)
    assert simulated.history[1].server["held_out_accuracy"] > 0.5
    again = simulate(_classifier(spec, {"weights": str(found)}), shards, cohorts={1: labelled, 2: labelled})
    classifier = load_tensors(fine_tuned)
    assert all(torch.equal(again.initial[name], model[name]) for name in (WEIGHT, BIAS))
    assert classifier.keys() == again.model.keys()
    assert all(torch.equal(classifier[name], again.model[name]) for name in classifier)
    assert not torch.equal(classifier[WEIGHT], model[WEIGHT])


def _classifier(spec: RunSpec, initial: dict[str, str]) -> RunSpec:
    """Return a run that fine-tunes encoder and classifier of an earlier one."""
    return method_spec(
        "classifier",
        model={"encoder": spec.model.encoder.model_dump(mode="json"), "initial": initial},
        cohort=spec.cohort.model_dump(mode="json"),
        partition=spec.model_dump(mode="json")["partition"],
    )
