"""A run with public images registered with the coordinator has the same bits as with images found by name."""

from pathlib import Path

import pytest
import torch

from fedssl.simulation import simulate
from support.data_sets import digits_file
from support.deployed import assert_simulated, wait_until_completed
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers

pytestmark = [pytest.mark.parity, pytest.mark.full]


def test_flesd_with_registered_images_equals_its_simulation(servers: Servers, tmp_path: Path) -> None:
    """The images have a known data set's name, so that one spec runs both ways. One worker restarts between runs."""
    spec = method_spec("flesd", cohort={"min_clients": 3})
    assert spec.public_data is not None
    clients = shards(spec)
    simulated = simulate(spec, clients).model
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", clients) as running,
    ):
        source = digits_file(tmp_path, spec.public_data.split)
        digest = running.client.add_public_dataset("digits", source, split=spec.public_data.split).digest
        for name in clients:
            running.start(name)
        caches = [running.folder / "state" / name / "public" / f"{digest}.safetensors" for name in clients]
        fetched: list[int] = []
        for _ in range(2):
            created = running.client.create_run(spec)
            assert created.spec.public_data is not None
            assert created.spec.public_data.digest == digest
            wait_until_completed(running, created.id, 100)
            assert_simulated(running, created.id, simulated)
            fetched.append(caches[0].stat().st_ino)
            assert all(cache.read_bytes() == source.read_bytes() for cache in caches)
            running.kill(next(iter(clients)))
            running.start(next(iter(clients)))
        assert fetched[0] == fetched[1]  # the same file that the first run fetched
        again = simulate(created.spec, clients).model  # the run's own spec, with the digest
        assert [name for name in simulated if not torch.equal(again[name], simulated[name])] == []
