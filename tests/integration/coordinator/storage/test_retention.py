"""Which artifacts garbage collection removes, which it keeps, and how a missing artifact is found."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from fedssl.artifacts.store import FileStore
from fedssl.client import Conflict, NotFound
from fedssl.errors import StoreUnavailable
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.states import RunState
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.main import app
from fedssl_coordinator.storage.artifacts import repository as artifacts
from fedssl_coordinator.storage.retention import repository as retention
from fedssl_coordinator.storage.retention.service import retention_periods
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes, write_file
from support.federation import tensors_for, upload
from support.scenario import Scenario
from support.tables import Tables
from support.uploads import digest

DAY = 86_400
MONTH = 31 * DAY


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=4)


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def collect() -> dict[str, int]:
    """Collect garbage, check that the remaining store is intact, and return the number of removed artifacts by kind."""
    from fedssl_coordinator.storage.retention import collection

    collected = collection.collect()
    assert collected is not None
    result = run_command("verify-store")
    assert result.exit_code == 0, result.output
    return dict(collected.counts)


def is_stored(coordinator: Coordinator, name: str) -> bool:
    return (coordinator.store / name[:2] / name[2:4] / name).is_file()


def age(tables: Tables, seconds: float) -> None:
    """Make the ends of rounds and the last uses of artifacts `seconds` earlier."""
    tables.execute("UPDATE rounds SET closed_at = closed_at - make_interval(secs => %s)", seconds)
    tables.execute("UPDATE artifacts SET touched_at = touched_at - make_interval(secs => %s)", seconds)


def test_updates_are_removed_once_their_round_is_closed(
    scenario: Scenario, coordinator: Coordinator, tmp_path: Path
) -> None:
    item = scenario.claim("a")
    scenario.deliver("a", 1.0)
    scenario.work("b", value=2.0)
    updates = [str(part.update) for part in scenario.round.assignments]
    assert collect() == {}
    scenario.advance()
    with transaction() as session:
        assert artifacts.hold(session, updates[0])
        assert collect() == {"update": 1}  # a row that another transaction has locked is left for the next time
        assert is_stored(coordinator, updates[0])
    assert collect() == {"update": 1}
    with transaction() as session:  # `verify-store` reports nothing that was removed while it read
        assert not retention.is_needed(session, updates[0], retention_periods())
    assert not any(is_stored(coordinator, update) for update in updates)
    assert [part.update for part in scenario.rounds[0].assignments] == updates  # the record stays
    events = scenario.events("artifact.collected")
    assert [(event.data["kind"], event.data["count"]) for event in events] == [("update", 1)] * 2
    assert events[0].data["bytes"] > 0
    with pytest.raises(NotFound):
        coordinator.client.artifact_header(updates[0])
    # A worker that did not get the answer sends the update again: the upload succeeds, and nothing is stored.
    assert upload(scenario.workers["a"], item, tensors_for(item.plan.update, 1.0), tmp_path) == updates[0]
    assert not is_stored(coordinator, updates[0])
    last = scenario.claim("a").last_accepted
    assert last is not None
    assert last.update == updates[0]
    assert collect() == {}


def test_an_upload_that_was_never_submitted_is_removed_after_its_lease(
    scenario: Scenario, coordinator: Coordinator, tmp_path: Path
) -> None:
    item = scenario.claim("a")
    update = upload(scenario.workers["a"], item, tensors_for(item.plan.update, 1.0), tmp_path)
    assert collect() == {}
    scenario.expire_lease("a")
    scenario.advance()
    assert collect() == {"update": 1}
    assert not is_stored(coordinator, update)
    scenario.work("a", "b")  # the same bytes, sent for the next attempt
    scenario.advance()
    assert scenario.rounds[0].verdict == "aggregated"


def test_a_run_keeps_its_first_newest_and_best_weights(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    for value in (1.0, 2.0, 3.0, 4.0):
        scenario.work("a", "b", value=value)
        scenario.advance()
        collect()
    assert scenario.run.state == RunState.FINISHED
    after = [each.broadcast for each in scenario.rounds]  # of the rounds 0 to 3
    judge(coordinator, tables, scenario, after[2], tmp_path)
    assert collect() == {}
    age(tables, MONTH)
    assert collect() == {"broadcast": 2}
    assert [is_stored(coordinator, each) for each in after] == [True, False, True, False]
    run = scenario.run
    assert is_stored(coordinator, str(run.model))
    assert is_stored(coordinator, str(run.server_state))
    config = JudgingConfig(dataset="held-out", measures=("geometry",))
    with pytest.raises(Conflict, match="the weights of round 3 were removed"):
        coordinator.client.request_evaluation(run.id, config, 3)
    assert coordinator.client.request_evaluation(run.id, config, 2).model == after[2]


def judge(coordinator: Coordinator, tables: Tables, scenario: Scenario, best: str, folder: Path) -> None:
    """Write a completed evaluation of every round, in which the weights `best` have the highest score."""
    content = labelled_bytes()
    coordinator.client.add_evaluation_dataset("held-out", write_file(folder, content))
    for number, each in enumerate(scenario.rounds):
        result = '{"probe": 0.9}' if each.broadcast == best else '{"knn": 0.5}'
        tables.execute(
            "INSERT INTO evaluations (id, run_id, round_number, model, dataset, dataset_digest, config, state, results,"
            " finished_at) VALUES (gen_random_uuid(), %s, %s, %s, 'held-out', %s, '{}', 'completed', %s, now())",
            scenario.id, number, each.broadcast, digest(content), result,
        )  # fmt: skip


def test_a_data_set_that_is_never_registered_is_removed_after_a_day(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    contents = [public_bytes(seed=seed) for seed in range(3)]
    kept, sent_again, forgotten = map(digest, contents)
    coordinator.client.add_public_dataset("scans", write_file(tmp_path, contents[0]))
    with coordinator.http() as http:
        assert http.put(f"/v1/artifacts/{sent_again}", content=contents[1]).status_code == 201
        assert http.put(f"/v1/artifacts/{forgotten}", content=contents[2]).status_code == 201
        assert collect() == {}
        age(tables, DAY)
        assert http.put(f"/v1/artifacts/{sent_again}", content=contents[1]).status_code == 200  # so it is kept
        assert collect() == {"unreferenced": 1}
        assert [is_stored(coordinator, each) for each in (kept, sent_again, forgotten)] == [True, True, False]
        wanted = {"name": "lost", "digest": forgotten, "split": "train"}
        assert http.post("/v1/public-datasets", json=wanted).status_code == 404
        assert http.post("/v1/public-datasets", json=wanted | {"digest": sent_again}).status_code == 201
    assert tables.one("SELECT count(*) FROM artifacts") == 2


def test_old_files_without_a_row_are_removed(coordinator: Coordinator, tables: Tables) -> None:
    """They are left by a process that was killed during an upload, or between writing the file and its row."""
    from fedssl_coordinator.core.store import store

    names = []
    for content in (b"old", b"new"):
        with store().writer() as writer:
            writer.write(content)
            names.append(writer.commit())
    (coordinator.store / "incoming" / "half").write_bytes(b"half an upload")
    two_days_ago = time.time() - 2 * DAY
    for path in (store().path(names[0]), coordinator.store / "incoming" / "half"):
        os.utime(path, (two_days_ago, two_days_ago))
    result = run_command("collect", "--dry-run")
    assert "would remove 1 artifact, 3 bytes" in result.output
    assert is_stored(coordinator, names[0])
    result = run_command("collect")
    assert "removed 2 artifacts, 17 bytes" in result.output
    assert [is_stored(coordinator, each) for each in names] == [False, True]
    assert not (coordinator.store / "incoming" / "half").exists()
    assert tables.one("SELECT count(*) FROM artifacts") == 0
    kinds = tables.query(
        "SELECT data ->> 'kind', data -> 'count' FROM events WHERE kind = 'artifact.collected' ORDER BY id"
    )
    assert kinds == [("unreferenced", 1), ("abandoned", 1)]


def test_an_outage_of_the_store_during_a_collection_leaves_no_false_rows(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No artifact that the collection may already have removed counts as stored."""
    from fedssl_coordinator.storage.retention import collection

    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    scenario.advance()
    delete = FileStore.delete

    def fail(self: FileStore, digest: str) -> None:
        raise StoreUnavailable("away")

    def delete_one(self: FileStore, digest: str) -> None:
        delete(self, digest)
        monkeypatch.setattr(FileStore, "delete", fail)

    monkeypatch.setattr(FileStore, "delete", delete_one)
    with pytest.raises(StoreUnavailable):
        collection.collect()
    monkeypatch.undo()
    updates = [str(each.update) for each in scenario.rounds[0].assignments]
    kept = {name for [name] in tables.query("SELECT digest FROM artifacts WHERE collected_at IS NULL")}
    assert [is_stored(coordinator, each) for each in updates].count(True) == 1
    assert kept.isdisjoint(updates)
    for path in coordinator.store.glob("??/??/*"):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    assert [event.data["count"] for event in scenario.events("artifact.collected")] == [1]
    assert collect() == {"update": 1}  # the other one, which was not removed


def test_a_read_only_store_is_reported_and_nothing_counts_as_removed(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator import tasks

    def fail(self: FileStore, digest: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", digest)

    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    scenario.advance()
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(FileStore, "delete", fail)
        tasks.collect()
        result = run_command("collect")
    assert [(line["log_level"], line["event"]) for line in logs] == [("error", "store.failed")]
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: the store failed: .*Read-only file system.*\n", result.stderr)
    assert scenario.events("artifact.collected") == []


def test_a_file_that_a_killed_collection_left_is_removed(
    scenario: Scenario, coordinator: Coordinator, tables: Tables
) -> None:
    """The row records that the artifact was removed, but the file still exists."""
    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    scenario.advance()
    update = str(scenario.rounds[0].assignments[0].update)
    tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest = %s", update)
    path = coordinator.store / update[:2] / update[2:4] / update
    os.utime(path, (time.time() - 2 * DAY,) * 2)
    assert collect() == {"update": 2}
    assert not path.exists()


def _remove(path: Path) -> None:
    path.unlink()


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _spoil(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_verify_store_finds_missing_and_damaged_files(scenario: Scenario, coordinator: Coordinator) -> None:
    scenario.work("a")
    update = str(scenario.round.assignments[0].update)
    path = coordinator.store / update[:2] / update[2:4] / update
    content = path.read_bytes()
    damages: tuple[tuple[Callable[[Path], None], str], ...] = (
        (_remove, "is missing"),
        (_shorten, "bytes instead of"),
        (_spoil, "has other bytes"),
    )
    for damage, said in damages:
        assert "no faults" in run_command("verify-store").output
        damage(path)
        result = run_command("verify-store")
        assert result.exit_code == 1, said
        assert f"{update} " in result.output
        assert said in result.output
        assert "1 fault\n" in result.output, said
        path.write_bytes(content)


def test_nothing_is_collected_while_a_backup_is_made(scenario: Scenario, coordinator: Coordinator) -> None:
    from fedssl_coordinator.aggregator.tasks import collect as task
    from fedssl_coordinator.storage.retention import collection

    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    scenario.advance()
    update = str(scenario.rounds[0].assignments[0].update)
    with collection.held_up():
        task()
        assert is_stored(coordinator, update)
        refused = run_command("collect")
        assert refused.exit_code == 1
        assert "try again later" in refused.output
    assert run_command("hold-collection", "--", "sh", "-c", "exit 7").exit_code == 7
    assert run_command("hold-collection", "--", "/no/such/program").exit_code == 127
    task()
    assert not is_stored(coordinator, update)


def test_a_backup_that_loses_its_lock_fails(scenario: Scenario) -> None:
    program = (
        "import psycopg; from fedssl_coordinator.core.settings import settings; "
        "url = settings().database_url.get_secret_value().replace('+psycopg', ''); "
        "psycopg.connect(url).execute(\"SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'\")"
    )
    result = run_command("hold-collection", "--", sys.executable, "-c", program)
    assert result.exit_code == 1
    assert "something may have been removed: run it again" in result.output


def test_a_finished_run_is_deleted_with_its_artifacts(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    other = Scenario(coordinator, tables, tmp_path, num_rounds=1, seed=1)
    scenario.work("a", value=1.0)
    late = scenario.claim("b")
    with pytest.raises(Conflict, match="stop it first"):
        coordinator.client.delete_run(scenario.id)
    coordinator.client.stop(scenario.id)
    before = tables.one("SELECT count(*) FROM events WHERE run_id = %s", scenario.id)
    with coordinator.http(coordinator.operator_token) as http:
        assert http.delete(f"/v1/runs/{scenario.id}").status_code == 403
    coordinator.client.delete_run(scenario.id)
    for table in ("rounds", "assignments", "metrics", "evaluations", "distillation_jobs"):
        assert tables.query(f"SELECT 1 FROM {table} WHERE run_id = %s", scenario.id) == []  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        coordinator.client.delete_run(scenario.id)
    with pytest.raises(NotFound, match="claim work"):
        upload(scenario.workers["b"], late, tensors_for(late.plan.update, 1.0), tmp_path)
    assert tables.one("SELECT count(*) FROM events WHERE run_id = %s", scenario.id) == before + 1
    age(tables, DAY)
    assert collect() == {"unreferenced": 2}  # the first weights and an update
    other.work("a", "b")
    other.advance()
    assert other.run.state == RunState.FINISHED


def test_every_reference_keeps_its_artifact_unless_its_end_is_declared(coordinator: Coordinator) -> None:
    """Artifacts of a new table are kept by default. Revise this list when a table is added."""
    from fedssl_coordinator.core.models import Base
    from fedssl_coordinator.storage.retention import repository

    ends = {str(column) for column in repository._conditions(repository.RetentionPeriods(0, 0, 0))}
    of_runs = {"assignments.update_digest", "uploads.digest", "rounds.broadcast", "rounds.model"}
    assert ends == of_runs | {"evaluations.model", "site_evaluations.model"}
    with transaction() as session:
        found = repository.references(session)
    digest_of_all = Base.metadata.tables["artifacts"].c.digest
    declared = [column for table in Base.metadata.sorted_tables for column in table.c]
    assert set(found) == {column for column in declared if column.references(digest_of_all)}
    assert ends < set(map(str, found))


def test_artifacts_to_which_only_a_newer_version_refers_are_kept(coordinator: Coordinator, tables: Tables) -> None:
    """During an upgrade and after a rollback, tables have columns that this version does not know."""
    contents = [public_bytes(seed=seed) for seed in range(3)]
    of_column, of_table, unneeded = map(digest, contents)
    with coordinator.http() as http:
        for content in contents:
            assert http.put(f"/v1/artifacts/{digest(content)}", content=content).status_code == 201
    tables.execute("ALTER TABLE projects ADD newer text REFERENCES artifacts (digest)")
    tables.execute("CREATE TABLE newer (artifact text REFERENCES artifacts (digest))")
    try:
        tables.execute("UPDATE projects SET newer = %s", of_column)
        tables.execute("INSERT INTO newer VALUES (%s)", of_table)
        age(tables, DAY)
        assert collect() == {"unreferenced": 1}
        assert [is_stored(coordinator, each) for each in (of_column, of_table, unneeded)] == [True, True, False]
        (coordinator.store / of_column[:2] / of_column[2:4] / of_column).unlink()
        result = run_command("verify-store")
        assert (result.exit_code, f"{of_column} is missing" in result.output) == (1, True)
    finally:
        tables.execute("ALTER TABLE projects DROP newer")
        tables.execute("DROP TABLE newer")
