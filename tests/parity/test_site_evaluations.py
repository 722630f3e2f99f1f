"""Evaluations at the sites give the same counts in a simulation and in a federation of real processes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from fedssl.data.partitioning import partition_dataset
from fedssl.evaluation.site_results import summarise_sites
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.protocol.states import RunState
from fedssl.protocol.views import SiteRoundView
from fedssl.simulation import simulate
from fedssl_worker.disclosure.ledger.verification import read_entries
from support.methods import method_spec
from support.processes import federation
from support.servers import Servers
from support.tables import Tables

pytestmark = pytest.mark.parity

CLASSES = [str(digit) for digit in range(10)]


def _spec() -> RunSpec:
    return method_spec(
        "fedsimclr",
        num_rounds=2,
        cohort={"min_clients": 3, "lease_seconds": 30},
        partition={"dataset": "digits", "num_clients": 3, "alpha": 1.0},
        evaluation={"at": "sites", "every": 1, "sites": {"classes": CLASSES, "min_count": 2, "cross_site": "probe"}},
    )


def _sent(state: Path) -> Counter[tuple[str, ...]]:
    """Return how often a worker's ledger records each kind of artifacts before sending."""
    bodies = (entry.body for entry in read_entries(state / "ledger"))
    return Counter(tuple(body["artifact"]) for body in bodies if body["kind"] == "intent")


@pytest.mark.full
def test_evaluations_at_sites_equal_those_of_a_simulation(servers: Servers, tmp_path: Path) -> None:
    """One of three sites has no labels, and refuses. The others give the counts of the simulation in every round."""
    spec = _spec()
    assert spec.partition is not None
    shards = partition_dataset(spec.partition, spec.data).by_client
    result = simulate(spec, shards)
    simulated = result.site_evaluations
    unlabelled = sorted(shards)[-1]
    labelled_sites = sorted(shards)[:-1]
    with (
        servers.database() as database,
        federation(database, servers.redis_url, tmp_path / "run", shards) as running,
        Tables(database) as tables,
    ):
        run = running.client.create_run(spec)
        for name in shards:
            running.start(name, **({} if name == unlabelled else {"FEDSSL_WORKER_LABELS": "own"}))

        def answered() -> list[SiteRoundView] | None:
            rounds = list(running.client.site_evaluations(run.id))
            is_done = all(site.state != "offered" for view in rounds for site in view.sites)
            is_done &= (
                len(tables.query("SELECT 1 FROM site_evaluations WHERE head_of IS NOT NULL AND ended_at IS NOT NULL"))
                == 6
            )
            is_finished = running.client.run(run.id).state == RunState.FINISHED
            return rounds if is_finished and is_done else None

        rounds = running.wait_for(answered, "the answers of all sites", 150)
        card = running.client.pull(run.id, tmp_path / "pulled").files["card"].read_text()
        stored = tables.query(
            "SELECT round_number, client_id, counts FROM site_evaluations WHERE counts IS NOT NULL AND head_of IS NULL"
        )
        crossed = tables.query(
            "SELECT round_number, head_of, client_id, counts FROM site_evaluations WHERE head_of IS NOT NULL"
        )
        shown = running.client.cross_site(run.id)
        sent = {name: _sent(tmp_path / "run" / "state" / name) for name in labelled_sites}
    counts = {(number, name): SiteCounts.model_validate_json(json.dumps(value)) for number, name, value in stored}
    labelled = set(shards) - {unlabelled}
    table = card.partition("## At the sites")[2].partition("## Lineage")[0]
    assert "The encoder of round 2, evaluated by each data owner on its own labelled images." in table
    assert f" Without a result: {unlabelled}." in table
    newest = rounds[-1]
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][2:] == [
        *(f"| {name}" for name in sorted(labelled)), "| worst site", "| mean", "| pooled",
    ]  # fmt: skip
    assert f"| mean |  | {' | '.join(f'{value:.6g}' for value in newest.mean.values())} |" in table
    assert counts.keys() == {(number, name) for number in (0, 1, 2) for name in labelled}
    assert all(counts[number, name] == simulated[number][name] for number, name in counts)
    assert [view.round_number for view in rounds] == [0, 1, 2]
    assert {(number, owner, judge) for number, owner, judge, _ in crossed} == {
        (number, owner, judge) for number in (0, 1, 2) for owner in labelled for judge in labelled - {owner}
    }
    for number, owner, judge, value in crossed:
        assert SiteCounts.model_validate_json(json.dumps(value)) == result.cross_site[number][owner][judge]
    assert (shown.round_number, {cell.head_of for cell in shown.cells}) == (2, labelled)
    assert shown.own == {
        site.client_id: {name: value for name, value in site.results.items() if name.startswith("probe/")}
        for site in newest.sites
        if site.results
    }
    for entries in sent.values():
        assert {tuple(kinds): count for kinds, count in entries.items()} == {
            ("weights",): 2, ("evaluation", "site-head"): 3, ("cross-evaluation",): 3,
            (): 1,  # the number of unreadable files, at registration
        }  # fmt: skip
    config = spec.site_evaluation
    assert config is not None
    assert config.sites is not None
    for view in rounds:
        expected = {name: counts[view.round_number, name] for name in labelled}
        summary = summarise_sites(expected, config.sites, config.site_measures)
        assert view.pooled == summary.pooled
        assert view.mean == summary.mean
        assert {name: (each.client_id, each.value) for name, each in view.worst.items()} == {
            name: (each.client_id, each.value) for name, each in summary.worst.items()
        }
        [refused] = [site for site in view.sites if site.client_id == unlabelled]
        assert (refused.state, refused.results) == ("refused", None)
        assert refused.reason == "this site has no labels: its worker was started without --labels"
