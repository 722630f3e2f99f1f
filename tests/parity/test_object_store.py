"""A federation with its artifacts in an object store has the bits of the simulation."""

from pathlib import Path

import pytest

from fedssl.data.partitioning import partition_dataset
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.deployed import assert_simulated, train_to_end
from support.object_store import ObjectStore
from support.processes import federation
from support.servers import Servers

pytestmark = [pytest.mark.parity, pytest.mark.full]

SPEC = RunSpec.model_validate(
    {
        "num_rounds": 2,
        "seed": 7,
        "method": {"name": "fedbyol"},
        "model": {
            "encoder": {"widths": [8, 16]},
            "projector": {"hidden_dims": [16], "out_dim": 8},
            "predictor": {"hidden_dims": [16], "out_dim": 8},
        },
        "data": {"channels": 1, "image_size": 8},
        "training": {"batch_size": 32},
        "cohort": {"min_clients": 2, "lease_seconds": 60},
        "partition": {"dataset": "digits", "num_clients": 2, "alpha": 0.5},
    }
)


def test_a_run_with_an_object_store_equals_its_simulation(
    servers: Servers, object_store: ObjectStore, tmp_path: Path
) -> None:
    assert SPEC.partition is not None
    shards = partition_dataset(SPEC.partition, SPEC.data).by_client
    simulated = simulate(SPEC, shards).model
    bucket = object_store.new_bucket()
    settings = {**object_store.environment(bucket, tmp_path / "cache"), "FEDSSL_STORE_DIRECT": "1"}
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path, shards, **settings) as running,
    ):
        run = train_to_end(running, SPEC, shards, 150)
        assert_simulated(running, run.id, simulated)
    assert not (tmp_path / "store").exists()
    assert object_store.objects(bucket)
