"""Simulated, deployed in plain fixed point and deployed with masks: equal bits, whichever worker is killed when."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.deployed import assert_same_bits, completed
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers

pytestmark = pytest.mark.parity

FIXED: dict[str, Any] = {
    "aggregation": {"arithmetic": "fixed"},
    "partition": {"dataset": "digits", "num_clients": 4, "alpha": 1.0, "max_images": 200},
    "cohort": {"min_clients": 4, "lease_seconds": 30},
}
SECURE: dict[str, Any] = {"secure_aggregation": {"min_cohort": 3, "collusion": 0, "phase_seconds": 20}}


def _spec(name: str, **changes: Any) -> RunSpec:
    return method_spec(name, num_rounds=2, **{**FIXED, **changes})


def test_deployed_with_masks(servers: Servers, tmp_path: Path) -> None:
    spec = _spec("fedbyol", **SECURE)
    images = shards(spec)
    simulated = simulate(_spec("fedbyol"), images)
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", images) as running,
    ):
        run = completed(running, spec, images, 60)
        running.client.download_model(run.id, tmp_path / "model")
        assert_same_bits(tmp_path / "model", simulated.model)
