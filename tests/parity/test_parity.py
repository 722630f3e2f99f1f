"""Simulation and deployment give equal bits, whatever is killed on the way."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedssl.data import ImageData
from fedssl.data.partitioning import partition_dataset
from fedssl.protocol.measures import MEASURES
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState
from fedssl.simulation import simulate
from support.deployed import assert_simulated, wait_until_completed
from support.methods import TRAINED_METHODS, method_spec, methods_of_this_run
from support.methods import shards as digits
from support.processes import Federation, federation
from support.servers import Servers

pytestmark = pytest.mark.parity


def _spec(method: dict[str, Any], **changes: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "num_rounds": 3,
            "seed": 7,
            "method": method,
            "model": {
                "encoder": {"widths": [8, 16]},
                "projector": {"hidden_dims": [16], "out_dim": 8},
                "predictor": {"hidden_dims": [16], "out_dim": 8},
            },
            "data": {"channels": 1, "image_size": 8},
            "training": {"batch_size": 32, "local_epochs": 2},
            "cohort": {"min_clients": 3, "lease_seconds": 30},
            "partition": {"dataset": "digits", "num_clients": 3, "alpha": 0.5},
            **changes,
        }
    )


def _shards(spec: RunSpec) -> dict[str, ImageData]:
    assert spec.partition is not None
    return partition_dataset(spec.partition, spec.data).by_client


SCHEDULED: dict[str, Any] = {
    "name": "adamw",
    "learning_rate": 1e-3,
    "schedule": "cosine_per_step",
    "warmup_rounds": 0.5,
    "final_learning_rate": 1e-5,
    "weight_decay": 0.04,
    "final_weight_decay": 0.4,
    "decay_norms_and_biases": False,
    "layer_decay": 0.75,
    "max_gradient_norm": 0.5,
}
SCHEDULED_TARGET = {"name": "fedbyol", "target_momentum_schedule": "cosine"}
MULTI_CROP = {
    "data": {
        "channels": 1,
        "image_size": 8,
        "second_view": {"solarize": 0.5},
        "local_crops": {"num_crops": 2, "image_size": 4, "blur": 0.5},
    },
    "aggregation": {"encoder_average": {"decay": 0.5}},
}
SUMMED_METHODS = [name for name in TRAINED_METHODS if method_spec(name).method.why_not_summed is None]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "options"),
    [({"name": "fedbyol"}, {}), (SCHEDULED_TARGET, {"optimizer": SCHEDULED})],
    ids=["constant", "scheduled"],
)
def test_a_run_with_a_killed_worker_and_another_order_of_arrival_equals_its_simulation(
    method: dict[str, Any], options: dict[str, Any], servers: Servers, tmp_path: Path
) -> None:
    """BYOL's target network is client state that must survive the kill. The workers start in reverse order."""
    # A worker reports its progress after two seconds. The victim trains longer, and the others have few images.
    spec = _spec(method, training={"batch_size": 8, "local_epochs": 24, **options}, num_rounds=2)
    few, victim = np.arange(40), "client-1"
    shards = {name: images if name == victim else images.subset(few) for name, images in _shards(spec).items()}
    simulated = simulate(spec, shards)
    assert any(not torch.equal(simulated.model[name], simulated.initial[name]) for name in simulated.model)
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", shards) as running,
    ):
        run = running.client.create_run(spec)
        for name in sorted(shards, reverse=True):
            running.start(name)

        def in_mid_training() -> bool:
            current = running.client.run(run.id).current_round
            return current is not None and current.number == 2 and any(
                a.client_id == victim
                and a.state == AssignmentState.LEASED
                and a.progress is not None
                and a.progress.phase == "training"
                for a in current.assignments
            )  # fmt: skip

        running.wait_for(in_mid_training, f"{victim} training in round 2")
        running.kill(victim, signal.SIGKILL)
        running.start(victim)
        done = wait_until_completed(running, run.id)
        assert_simulated(running, run.id, simulated.model)
        kinds = [event.message for event in running.client.event_log(run.id) if event.client_id == victim]
        assert any("has resumed the assignment" in message for message in kinds), kinds
        assert done.rounds_closed == spec.num_rounds


@pytest.fixture(scope="module")
def three_workers(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a federation for the module's tests, whose workers run."""
    folder = tmp_path_factory.mktemp("federation")
    with (
        servers.database() as database,
        federation(database, servers.redis_url, folder, digits(method_spec("fedsimclr"))) as running,
    ):
        for name in running.clients:
            running.start(name, FEDSSL_WORKER_LABELS="own")  # for the methods that use the sites' labels
        running.wait_for(lambda: sum(c.registered_at is not None for c in running.client.clients()) == 3, "workers")
        yield running


@pytest.mark.parametrize("name", methods_of_this_run(TRAINED_METHODS))  # the other method: test_ridge_probe.py
def test_a_run_of_every_method_equals_its_simulation(name: str, three_workers: Federation) -> None:
    spec = method_spec(name, cohort={"min_clients": 3, "clients": sorted(three_workers.clients)})
    run = three_workers.client.create_run(spec)
    simulated = simulate(spec, three_workers.clients)
    wait_until_completed(three_workers, run.id)
    assert_simulated(three_workers, run.id, simulated.model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "training", "more"),
    [
        (SCHEDULED_TARGET, {"optimizer": SCHEDULED, "num_micro_batches": 4}, {}),
        ({"name": "fedsimclr"}, {"optimizer": {"name": "lars", "learning_rate": 0.5, "max_gradient_norm": 0.5}}, {}),
        ({"name": "feddino", "num_prototypes": 16}, {"num_micro_batches": 2}, MULTI_CROP),
        ({"name": "fedsimclr", "add_ons": [{"name": "scaffold"}]}, {"epoch_fraction": 0.5}, {}),
    ],
    ids=["schedules", "lars", "multi-crop", "half epochs"],
)
def test_a_run_with_options_of_local_training_equals_its_simulation(
    method: dict[str, Any], training: dict[str, Any], more: dict[str, Any], three_workers: Federation
) -> None:
    """Half of the clients take part in each round, so that schedules must not depend on earlier rounds."""
    cohort = {"min_clients": 3, "clients": sorted(three_workers.clients), "fraction": 0.5}
    settings = {"batch_size": 32, "local_epochs": 2, **training}
    spec = method_spec(method["name"], method=method, cohort=cohort, training=settings, num_rounds=3, **more)
    run = three_workers.client.create_run(spec)
    simulated = simulate(spec, three_workers.clients)
    wait_until_completed(three_workers, run.id)
    assert_simulated(three_workers, run.id, simulated.model)


_FEDX = {"name": "fedx", "rel_kl": "paper", "variant": "paper", "relational": "predictions"}
_UNIT = {"name": "crossed_kl", "scale": "unit", "exponent": -10}


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ({"name": "fedbyol", "add_ons": [_FEDX], "reducer": {"name": "median"}}, {}),
        (
            {"name": "fedsimclr", "add_ons": [{"name": "hsd", "variant": "projection"}]},
            {"robustness": {"max_examples_ratio": 1.2}},
        ),
        ({"name": "fedsimclr", "reducer": {"name": "trimmed_mean"}}, {}),
        (
            {"name": "fedsimclr", "reducer": {"name": "geometric_median"}},
            {"robustness": {"max_examples_ratio": 1.2}},
        ),
        ({"name": "fedrlc", "add_ons": [_UNIT]}, {}),
    ],
    ids=["fedx-paper-median", "hsd-projection", "trimmed-mean", "geometric-median", "fedrlc-unit"],
)
def test_a_run_with_a_variant_or_a_robust_reducer_equals_its_simulation(
    method: dict[str, Any], more: dict[str, Any], three_workers: Federation
) -> None:
    cohort = {"min_clients": 3, "min_updates": 3, "clients": sorted(three_workers.clients)}
    spec = method_spec(method["name"], method=method, cohort=cohort, **more)
    run = three_workers.client.create_run(spec)
    simulated = simulate(spec, three_workers.clients)
    wait_until_completed(three_workers, run.id)
    assert_simulated(three_workers, run.id, simulated.model)


@pytest.mark.full
def test_a_run_with_multi_krum_equals_its_simulation(servers: Servers, tmp_path: Path) -> None:
    """Both sides keep the same updates, and so have the same weights. Multi-Krum needs five clients."""
    spec = method_spec(
        "fedsimclr",
        method={"name": "fedsimclr", "reducer": {"name": "multi_krum", "num_selected": 3}},
        cohort={"min_clients": 5, "min_updates": 5},
        partition={"dataset": "digits", "num_clients": 5, "scheme": "iid", "max_images": 360},
    )
    shards = _shards(spec)
    simulated = simulate(spec, shards)
    mean = simulate(spec.model_copy(update={"method": method_spec("fedsimclr").method}), shards)
    assert any(not torch.equal(simulated.model[name], mean.model[name]) for name in mean.model)
    with (
        servers.database() as database,
        federation(database, servers.second_redis_url, tmp_path / "run", shards) as running,  # next to three_workers
    ):
        run = running.client.create_run(spec)
        for name in shards:
            running.start(name)
        wait_until_completed(running, run.id)
        assert_simulated(running, run.id, simulated.model)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", methods_of_this_run(SUMMED_METHODS))
def test_a_run_of_every_method_in_fixed_point_equals_its_simulation(name: str, three_workers: Federation) -> None:
    cohort = {"min_clients": 3, "clients": sorted(three_workers.clients)}
    spec = method_spec(name, cohort=cohort, aggregation={"arithmetic": "fixed"})
    run = three_workers.client.create_run(spec)
    simulated = simulate(spec, three_workers.clients)
    wait_until_completed(three_workers, run.id)
    assert_simulated(three_workers, run.id, simulated.model)


@pytest.mark.parametrize("action", ["clip", "reject"])
def test_a_run_with_a_maximum_update_norm_equals_its_simulation(action: str, three_workers: Federation) -> None:
    """Both sides have the same norms, clip or reject the same updates, and have the same weights."""
    cohort = {"min_clients": 3, "clients": sorted(three_workers.clients), "min_updates": 1}
    free = simulate(method_spec("fedsimclr", cohort=cohort, robustness={"max_update_norm": 1e9}), three_workers.clients)
    norms = sorted(record["update_norm"] for record in free.history[0].clients.values())
    robustness = {"max_update_norm": (norms[1] + norms[2]) / 2, "action": action}
    spec = method_spec("fedsimclr", cohort=cohort, robustness=robustness)
    run = three_workers.client.create_run(spec)
    simulated = simulate(spec, three_workers.clients)
    assert any(not torch.equal(simulated.model[name], free.model[name]) for name in free.model)
    done = wait_until_completed(three_workers, run.id)
    assert_simulated(three_workers, run.id, simulated.model)
    told = {
        (metric.round_number, str(metric.client_id)): metric.value
        for metric in three_workers.client.metrics(done.id, "update_norm")
    }
    expected = {
        (r.round_number, name): values["update_norm"] for r in simulated.history for name, values in r.clients.items()
    }
    assert told == expected


@pytest.mark.full
def test_a_run_with_bounded_shares_and_rejected_updates_equals_its_simulation(three_workers: Federation) -> None:
    """A rejected client keeps its control variate on both sides, and every measurement is the same number."""
    cohort = {"min_clients": 3, "clients": sorted(three_workers.clients), "min_updates": 1}
    scaffold = {"name": "fedsimclr", "add_ons": [{"name": "scaffold"}]}
    changes: dict[str, Any] = {"cohort": cohort, "method": scaffold, "num_rounds": 3}
    free = simulate(method_spec("fedsimclr", **changes), three_workers.clients)
    controls = sorted(found["update_control_norm"] for found in free.history[0].updates.values())
    robustness = {"max_control_norm": (controls[1] + controls[2]) / 2, "max_weight_share": 0.4, "action": "reject"}
    spec = method_spec("fedsimclr", robustness=robustness, **changes)
    run = three_workers.client.create_run(spec)
    simulated = simulate(spec, three_workers.clients)
    assert any(record.rejected for record in simulated.history)
    done = wait_until_completed(three_workers, run.id)
    assert_simulated(three_workers, run.id, simulated.model)
    for name in MEASURES:
        measured = {(m.round_number, str(m.client_id)): m.value for m in three_workers.client.metrics(done.id, name)}
        expected = {
            (record.round_number, client): found[name]
            for record in simulated.history
            for client, found in record.updates.items()
            if name in found
        }
        assert measured == expected, name
    unusual = [e.message for e in three_workers.client.event_log(run.id) if e.kind == "update.unusual"]
    assert unusual == [message for record in simulated.history for message in record.unusual]
