"""Runs of a newer coordinator after a rollback to this version, which does not know one of their settings."""

import json
from pathlib import Path

import pytest

from fedssl.artifacts.store import digest_of
from fedssl.client import Conflict
from fedssl.protocol.states import SiteEvaluationState
from fedssl_coordinator.federation import run_rows
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import MakeScenario
from support.site_counts import sites_spec
from support.tables import Tables


@pytest.mark.parametrize(("part", "path"), [("spec", "training,from_later"), ("plan", "from_later")])
def test_a_newer_run_blocks_no_other_run_and_requests_for_it_explain_why(
    make_scenario: MakeScenario, tables: Tables, tmp_path: Path, part: str, path: str
) -> None:
    newer = make_scenario("a")
    tables.execute(f"UPDATE runs SET {part} = jsonb_set({part}, '{{{path}}}', '1') WHERE id = %s", newer.id)
    run_rows._definitions.clear()
    other = make_scenario("a")
    assert other.claim("a").run_id == other.id
    ((state, reason),) = tables.query("SELECT state, reason FROM runs WHERE id = %s", newer.id)
    assert state == "paused"
    name = path.replace(",", ".")
    assert f"({name}: Extra inputs are not permitted): upgrade the coordinator" in reason
    client = newer.coordinator.client
    requests = (client.run, client.resume, client.stop) if part == "spec" else (client.run, client.resume)
    for request in requests:
        with pytest.raises(Conflict, match=rf"does not understand the {part} of run .*{name}"):
            request(newer.id)
    assert newer.id in {run.id for run in client.runs()}

    tables.execute(f"UPDATE runs SET {part} = {part} #- '{{{path}}}' WHERE id = %s", newer.id)
    client.resume(newer.id)
    other.deliver("a")
    item = newer.claim("a")
    assert item.run_id == newer.id

    tables.execute("UPDATE runs SET plan = jsonb_set(plan, '{from_later}', '1') WHERE id = %s", newer.id)
    (file := tmp_path / "update").write_bytes(b"a large update, which is not delivered with its submission")
    with pytest.raises(Conflict, match="does not understand the plan of run"):
        newer.workers["a"].upload(digest_of(file), file, item.assignment_id)


def test_evaluations_of_a_newer_run_block_no_other_evaluation_at_a_site(
    coordinator: Coordinator, tables: Tables
) -> None:
    worker, other = coordinator.worker("a"), coordinator.worker("b")
    newer, known = (coordinator.client.create_run(sites_spec()).id for _ in range(2))
    for run_id in (newer, known):
        coordinator.advance(run_id)
    tables.execute("UPDATE runs SET spec = jsonb_set(spec, '{training,from_later}', '1') WHERE id = %s", newer)
    for site in (worker, other):
        item = site.claim_site_evaluation()
        assert item is not None
        assert item.run_id == known
    states = tables.query("SELECT state, reason FROM site_evaluations WHERE run_id = %s", newer)
    assert [state for state, _ in states] == [SiteEvaluationState.EXPIRED] * 2
    assert "does not understand the spec of run" in states[0][1]


def test_unknown_values_of_a_clients_registration_block_no_run(coordinator: Coordinator, tables: Tables) -> None:
    worker, _ = coordinator.worker("a"), coordinator.worker("b")
    rules = [{"artifact": artifact, "methods": ["*"]} for artifact in ("weights", "metrics", "from-later")]
    declared = {
        "policy": {"digest": "0" * 64, "allow": rules},
        "encoder": {"name": "from-later"},
        "serves": {"from_later": 1},
        "check": {"from_later": 1},
    }
    for name, value in declared.items():
        tables.execute(f"UPDATE clients SET \"{name}\" = %s WHERE id = 'a'", json.dumps(value))
    run = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 2}))
    coordinator.advance(run.id)
    item = worker.claim(wait_seconds=0)
    assert item is not None
    assert item.run_id == run.id
    seen = next(view for view in coordinator.client.clients() if view.id == "a")
    assert seen.policy is not None
    assert [rule.artifact for rule in seen.policy.allow] == ["weights", "metrics"]
    assert (seen.encoder, seen.serves, seen.check) == (None, None, None)
    assert coordinator.client.run(run.id).left_out == {}


def test_a_run_with_rows_in_a_table_of_a_newer_version_is_not_deleted(coordinator: Coordinator, tables: Tables) -> None:
    run_id = coordinator.client.create_run(tiny_spec()).id
    coordinator.client.stop(run_id)
    tables.execute("CREATE TABLE from_later (run_id uuid REFERENCES runs (id))")
    tables.execute("INSERT INTO from_later VALUES (%s)", run_id)
    with pytest.raises(Conflict, match=r"or because rows of a newer version belong to it: .* upgrade the coordinator"):
        coordinator.client.delete_run(run_id)
    tables.execute("DROP TABLE from_later")
    coordinator.client.delete_run(run_id)
