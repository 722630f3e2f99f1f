"""The probe over all sites, and the classifier that the sites train from it, have the bits of their simulations."""

import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest
import torch

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import load_tensors
from fedssl.client import Client, NotFound
from fedssl.data.partitioning import partition_dataset
from fedssl.methods import METHODS
from fedssl.models.classifier import BIAS, WEIGHT
from fedssl.protocol.data_card import DataReport
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts, SiteHead
from fedssl.protocol.states import RunState
from fedssl.simulation import simulate
from fedssl_worker.disclosure.ledger.verification import read_entries
from support.methods import method_spec
from support.processes import federation
from support.servers import Servers
from support.tables import Tables

pytestmark = pytest.mark.parity


@pytest.mark.full
def test_a_probe_and_a_classifier_equal_their_simulations(servers: Servers, tmp_path: Path) -> None:
    """One of three sites has no labels, so it is left out."""
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
        Tables(database) as tables,
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
        running.wait_for(lambda: _is_judged(running.client, trained.id), "the sites' counts", 60)
        judged = tables.query(
            "SELECT round_number, client_id, head_of, counts, head FROM site_evaluations WHERE counts IS NOT NULL"
        )
        sent = {name: _sent(tmp_path / "run" / "state" / name) for name in labelled}
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
    assert {(number, name, owner) for number, name, owner, *_ in judged} == {
        (number, name, owner if owner != name else None)
        for number in (0, 1, 2)
        for name in labelled
        for owner in labelled
    }
    answers: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in labelled}
    for number, name, owner, value, head in judged:
        expected = again.site_evaluations[number][name] if owner is None else again.cross_site[number][owner][name]
        counts = SiteCounts.model_validate_json(json.dumps(value))
        assert counts == expected
        size = len(counts.model_dump_json())
        if owner is None:
            size += len(SiteHead.model_validate_json(json.dumps(head)).model_dump_json())
        answers[name]["evaluation+site-head" if owner is None else "cross-evaluation"].append(size)
        assert isinstance(expected, SiteCounts)
        assert set(expected.measures) == ({"personal"} if owner else {"knn", "classifier", "personal"})
    assert again.site_evaluations[0] != again.site_evaluations[2]
    sums, weights = (file_bytes(METHODS[each.method.name].bind(each).plan.update) for each in (spec, trained.spec))
    unreadable = len(DataReport(num_unreadable=0).model_dump_json())  # at registration
    for name, path in sent.items():  # every byte that was sent, by its kind
        left = {kind: sorted(sizes) for kind, sizes in path.items()}
        own = {kind: sorted(sizes) for kind, sizes in answers[name].items()}
        assert left == {"": [unreadable], "probe-sums": [sums] * 2, "weights": [weights] * 2, **own}


def _is_judged(client: Client, run_id: UUID) -> bool:
    """Return whether all sites have answered, and the two with labels have each other's counts of three rounds."""
    rounds = list(client.site_evaluations(run_id))
    is_answered = all(site.state != "offered" for view in rounds for site in view.sites)
    with suppress(NotFound):
        cells = [cell for view in rounds for cell in client.cross_site(run_id, view.round_number).cells]
        return is_answered and len(cells) == 6 and all(cell.results for cell in cells)
    return False


def _sent(state: Path) -> dict[str, list[int]]:
    """Return the bytes of everything that a site has sent, by kind, from the site's ledger."""
    found = defaultdict(list)
    for entry in read_entries(state / "ledger"):
        if entry.kind == "intent":
            found["+".join(entry.body["artifact"])].append(int(entry.body["bytes"]))
    return found


def _classifier(spec: RunSpec, initial: dict[str, str]) -> RunSpec:
    """Return a run that fine-tunes the encoder and the classifier of an earlier one."""
    return method_spec(
        "classifier",
        method={"name": "classifier", "personal_pull": 0.1},
        evaluation={
            "at": "sites",
            "every": 1,
            "measures": ["knn"],
            "sites": {
                "classes": [str(digit) for digit in range(10)],
                "min_count": 1,
                "heads": ["classifier", "personal"],
                "cross_site": "personal",
            },
        },
        model={"encoder": spec.model.encoder.model_dump(mode="json"), "initial": initial},
        cohort=spec.cohort.model_dump(mode="json"),
        partition=spec.model_dump(mode="json")["partition"],
    )
