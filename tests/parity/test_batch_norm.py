"""A run whose sites keep their own BatchNorm has the bits of its simulation, also when continued and evaluated at
sites."""

import json
from pathlib import Path

import pytest

from fedssl.data.partitioning import partition_dataset
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.protocol.states import RunState
from fedssl.protocol.views import RunView
from fedssl.run_files import CARD
from fedssl.simulation import simulate
from support.deployed import assert_planned_size, assert_same_bits, download_updates
from support.methods import method_spec
from support.processes import federation
from support.servers import Servers
from support.tables import Tables

pytestmark = [pytest.mark.parity, pytest.mark.full]

SITES = {"classes": [str(digit) for digit in range(10)], "min_count": 2}


def test_sites_keep_their_batch_norm_over_a_continuation_and_evaluate_with_it(servers: Servers, tmp_path: Path) -> None:
    values = method_spec(
        "fedbyol",
        cohort={"min_clients": 2, "lease_seconds": 30},
        partition={"dataset": "digits", "num_clients": 2, "alpha": 1.0},
        evaluation={"at": "sites", "every": 1, "measures": ["knn"], "sites": SITES},
    ).model_dump(mode="json")
    values["model"]["batch_norm"] = "local"
    spec = RunSpec.model_validate(values)
    assert spec.partition is not None
    shards = partition_dataset(spec.partition, spec.data).by_client
    simulated = simulate(spec.continued(3), shards)
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", shards) as running,
        Tables(database) as tables,
    ):
        run = running.client.create_run(spec)
        for name in shards:
            running.start(name, FEDSSL_WORKER_LABELS="own")

        def finished() -> RunView | None:
            view = running.client.run(run.id)
            rounds = list(running.client.site_evaluations(run.id))
            is_answered = all(site.state != "offered" for each in rounds for site in each.sites)
            return view if view.state is RunState.FINISHED and is_answered else None

        running.wait_for(finished, "the end of two rounds", 100)
        killed = sorted(shards)[0]
        running.kill(killed)  # its BatchNorm is on its disk
        running.start(killed, FEDSSL_WORKER_LABELS="own")
        running.client.continue_run(run.id, 3)
        done = running.wait_for(finished, "the end of the third round", 100)
        updates = download_updates(running, done, tmp_path)
        running.client.pull(done.id, tmp_path / "pulled")
        stored = tables.query("SELECT round_number, client_id, counts FROM site_evaluations WHERE counts IS NOT NULL")
    assert_same_bits(tmp_path / "pulled" / "model.safetensors", simulated.model)
    assert_planned_size(updates, spec)
    assert "each site keeps its own; these weights have the initial one" in (tmp_path / "pulled" / CARD).read_text()
    counts = {(number, name): SiteCounts.model_validate_json(json.dumps(value)) for number, name, value in stored}
    assert counts.keys() == {(number, name) for number in range(4) for name in shards}
    assert all(counts[number, name] == simulated.site_evaluations[number][name] for number, name in counts)
