"""The tables: migrations and models agree, and Postgres itself refuses rows that must never exist."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from fedssl_coordinator.core import migrate as migrations
from fedssl_coordinator.core.migrate import alembic_config
from fedssl_coordinator.core.models import Base
from support.environment import coordinator_environment, migrate
from support.servers import Servers
from support.tables import Tables

pytestmark = pytest.mark.full


DIGEST = "d" * 64


def _environment(servers: Servers, url: str, tmp_path: Path) -> dict[str, str]:
    return coordinator_environment(url, servers.redis_url, tmp_path / "store")


def _to(url: str, move: Any, revision: str) -> None:
    engine = create_engine(url)
    with engine.connect() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        move(config, revision)
    engine.dispose()


def _differences(url: str) -> list[Any]:
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        found = compare_metadata(context, Base.metadata)
    engine.dispose()
    return list(found)


def _constraints(url: str) -> list[tuple[Any, ...]]:
    """Return constraints and indexes with their definitions. Alembic compares neither checks nor index conditions."""
    with Tables(url) as tables:
        return tables.query(
            "SELECT conrelid::regclass::text, conname::text, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version' "
            "AND contype <> 'n' "
            "UNION ALL SELECT tablename::text, indexname::text, indexdef FROM pg_indexes WHERE schemaname = 'public' "
            "AND tablename <> 'alembic_version' ORDER BY 1, 2, 3"
        )


def test_migrations_create_the_tables_of_the_models(
    servers: Servers, empty_url: str, tmp_path: Path, database_url: str
) -> None:
    migrate(_environment(servers, empty_url, tmp_path))
    assert _differences(empty_url) == []
    migrated = _constraints(empty_url)
    with servers.database(empty=True) as other:
        engine = create_engine(other)
        Base.metadata.create_all(engine)
        engine.dispose()
        assert _constraints(other) == migrated
    migrate(_environment(servers, empty_url, tmp_path))  # again: nothing to do
    assert _constraints(empty_url) == migrated


def _columns(url: str) -> dict[tuple[str, str], tuple[str, bool]]:
    """Return the type of every column, and whether a row may leave it out, by table and name."""
    with Tables(url) as tables:
        found = tables.query(
            "SELECT table_name, column_name, data_type, is_nullable = 'YES' OR is_identity = 'YES' "
            "OR column_default IS NOT NULL FROM information_schema.columns WHERE table_schema = 'public'"
        )
    return {(table, name): (kind, may_be_left_out) for table, name, kind, may_be_left_out in found}


REPLACING = {
    "2026_11_20_sixth": {"ck_tokens_role_known", "ck_tokens_worker_has_client"},
    "2026_11_25_second": {"uq_site_evaluations_run_id_round_number_client_id"},
}
"""Constraints that migrations of the first days have replaced at once. docs/deploy.md promises that no other does."""


def test_every_migration_only_adds_and_can_be_reverted_and_repeated(empty_url: str) -> None:
    """The previous version must work with the tables during an upgrade and after a rollback."""
    revisions = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
    seen: list[list[tuple[Any, ...]]] = []
    columns: dict[tuple[str, str], tuple[str, bool]] = {}
    for revision in revisions:
        _to(empty_url, command.upgrade, revision)
        before, present = columns, _constraints(empty_url)
        lost = {name for _, name, _ in set(seen[-1] if seen else []) - set(present)}
        assert lost == REPLACING.get(revision, set()), f"{revision}: the previous version needs what it has replaced"
        columns = _columns(empty_url)
        assert before.items() <= columns.items(), f"{revision}: the previous version needs what it has changed"
        old_tables = {table for table, _ in before}
        new = {at: may_be_left_out for at, (_, may_be_left_out) in columns.items() if at not in before}
        required = [at for at, may_be_left_out in new.items() if at[0] in old_tables and not may_be_left_out]
        assert required == [], f"{revision}: rows of the previous version lack what it requires"
        seen.append(present)
    for earlier in reversed([[], *seen[:-1]]):
        _to(empty_url, command.downgrade, "-1")
        assert _constraints(empty_url) == earlier
    with Tables(empty_url) as tables:
        assert tables.names() == []
    _to(empty_url, command.upgrade, "head")
    assert _constraints(empty_url) == seen[-1]


def test_reverting_projects_revokes_the_tokens_and_deletes_the_destinations_of_one_project(empty_url: str) -> None:
    _to(empty_url, command.upgrade, "2026_11_24_projects")
    with Tables(empty_url) as tables:
        for label, project in (("all", None), ("one", "default")):
            statement: LiteralString = (
                "INSERT INTO tokens (id, role, label, secret_hash, project) VALUES (%s, 'admin', %s, %s, %s)"
            )
            tables.execute(statement, uuid4(), label, label, project)
            destination: LiteralString = (
                "INSERT INTO notification_destinations (id, kind, target, label, topics, project) "
                "VALUES (%s, 'webhook', 'https://example.org', %s, '{}', %s)"
            )
            tables.execute(destination, uuid4(), label, project)
    _to(empty_url, command.downgrade, "-1")
    with Tables(empty_url) as tables:
        assert tables.query("SELECT label, revoked_at IS NULL FROM tokens ORDER BY label") == [
            ("all", True),
            ("one", False),
        ]
        assert tables.query("SELECT label FROM notification_destinations") == [("all",)]


def test_specs_of_earlier_versions_keep_their_variant_of_hsd(empty_url: str) -> None:
    _to(empty_url, command.upgrade, "2026_11_25_second_data_reports")
    pull = {"name": "hsd", "variant": "projection"}
    add_ons: dict[str, Any] = {
        "without hsd": [{"name": "proximal", "mu": 1.0}],
        "earlier": [{"name": "proximal", "mu": 1.0}, {"name": "hsd", "num_clients": None}],
        "later": [pull],
    }
    with Tables(empty_url) as tables:
        for name, parts in add_ons.items():
            tables.execute(
                "INSERT INTO runs (id, name, method, method_version, state, spec, num_rounds) "
                "VALUES (%s, %s, 'fedsimclr', 1, 'created', %s, 1)",
                uuid4(),
                name,
                json.dumps({"name": name, "method": {"name": "fedsimclr", "add_ons": parts}}),
            )
    _to(empty_url, command.upgrade, "head")
    with Tables(empty_url) as tables:
        found = {spec["name"]: spec["method"]["add_ons"] for [spec] in tables.query("SELECT spec FROM runs")}
    masked = {"name": "hsd", "num_clients": None, "variant": "mask"}
    assert found == {**add_ons, "earlier": [add_ons["earlier"][0], masked]}


def test_operators_become_admins_and_a_downgrade_gives_no_token_more_rights(empty_url: str) -> None:
    _to(empty_url, command.upgrade, "2026_11_20_fifth")
    with Tables(empty_url) as tables:
        tables.execute("INSERT INTO clients (id) VALUES ('a')")
        tables.execute(
            "INSERT INTO tokens (id, role, label, secret_hash, client_id) VALUES "
            "(gen_random_uuid(), 'operator', '', '1', NULL), (gen_random_uuid(), 'worker', '', '2', 'a')"
        )
        _to(empty_url, command.upgrade, "2026_11_20_sixth")
        kept = [("1", "admin", None), ("2", "worker", None)]
        assert tables.query("SELECT secret_hash, role, expires_at FROM tokens ORDER BY 1") == kept
        tables.execute(
            "INSERT INTO tokens (id, role, label, secret_hash, client_id, expires_at) VALUES "
            "(gen_random_uuid(), 'operator', '', '3', NULL, NULL), (gen_random_uuid(), 'viewer', '', '4', NULL, NULL), "
            "(gen_random_uuid(), 'enrolment', '', '5', 'a', now()), "
            "(gen_random_uuid(), 'worker', '', '6', 'a', now() + interval '1 day')"
        )
        _to(empty_url, command.downgrade, "2026_11_20_fifth")
        left = [("1", "operator", True), ("2", "worker", True), ("6", "worker", False)]
        assert tables.query("SELECT secret_hash, role, revoked_at IS NULL FROM tokens ORDER BY 1") == left


def test_the_migrations_have_one_head_and_one_base() -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert len(scripts.get_heads()) == 1
    assert len(scripts.get_bases()) == 1
    assert all(script.doc for script in scripts.walk_revisions())


def test_several_processes_can_migrate_at_once(servers: Servers, empty_url: str, tmp_path: Path) -> None:
    environment = _environment(servers, empty_url, tmp_path)
    command_line = [sys.executable, "-m", "fedssl_coordinator", "migrate"]
    processes = [subprocess.Popen(command_line, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert _differences(empty_url) == []


def test_a_migration_that_collides_with_a_working_process_is_repeated(
    servers: Servers, empty_url: str, tmp_path: Path
) -> None:
    _to(empty_url, command.upgrade, "2026_11_25_site_evaluations")
    command_line = [sys.executable, "-m", "fedssl_coordinator", "migrate"]
    environment = _environment(servers, empty_url, tmp_path)
    url = empty_url.replace("+psycopg", "", 1)
    with psycopg.connect(url) as working, Tables(empty_url) as tables:
        working.execute("SET deadlock_timeout = '1min'")  # so that Postgres ends the migration, not this transaction
        working.execute("SELECT FROM runs")
        with subprocess.Popen(command_line, env=environment, stderr=subprocess.PIPE, text=True) as migration:
            while not tables.one("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'runs'::regclass"):
                assert migration.poll() is None
                time.sleep(0.02)
            working.execute("SELECT FROM clients")  # which the migration has locked
            working.commit()
            _, logged = migration.communicate(timeout=60)
    assert migration.returncode == 0, logged
    assert '"migration.collided"' in logged
    assert _differences(empty_url) == []


def test_a_migration_that_gives_up_names_the_sessions_that_hold_the_tables(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _to(empty_url, command.upgrade, "2026_11_25_site_evaluations")
    monkeypatch.setattr(migrations, "_TRIES", 1)
    engine, url = create_engine(empty_url), empty_url.replace("+psycopg", "", 1)
    with (
        psycopg.connect(url, application_name="pg_dump") as dump,
        psycopg.connect(url, application_name="other") as other,
        engine.connect() as connection,
    ):
        dump.execute("LOCK TABLE runs IN ACCESS SHARE MODE")  # as pg_dump does
        other.execute("SELECT 1")  # a transaction that holds no table
        config = alembic_config()
        config.attributes["connection"] = connection
        with capture_logs() as logs, pytest.raises(OperationalError, match="lock timeout"):
            migrations._upgrade_between_others(connection, config, "head")
        [held] = logs[-1]["held_by"]
        assert held.startswith(f"pid {dump.info.backend_pid} (pg_dump), idle in transaction, query of 2")
        assert "pg_terminate_backend" in logs[-1]["what_to_do"]
    engine.dispose()


def test_migrate_wait_ends_once_the_tables_exist(servers: Servers, empty_url: str, tmp_path: Path) -> None:
    environment = _environment(servers, empty_url, tmp_path)

    def wait(seconds: int) -> subprocess.Popen[bytes]:
        command_line = [sys.executable, "-m", "fedssl_coordinator", "migrate", "--wait", str(seconds)]
        return subprocess.Popen(command_line, env=environment, stderr=subprocess.DEVNULL)

    assert wait(0).wait(60) == 1
    leaving = wait(600)
    try:
        with Tables(empty_url) as tables:
            others = (
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            while not tables.one(others):
                assert leaving.poll() is None
                time.sleep(0.02)
        leaving.terminate()
        assert leaving.wait(60) == 143  # handled: a container's first process ignores it otherwise
    finally:
        leaving.kill()
        leaving.wait()
    waiting = wait(60)
    migrate(environment)
    assert waiting.wait(60) == 0
    with Tables(empty_url) as tables:  # the tables of a newer version, after a rollback to this one
        tables.execute("UPDATE alembic_version SET version_num = 'newer'")
    assert wait(0).wait(60) == 0


def test_tables_of_a_newer_version_stay_after_a_rollback(servers: Servers, empty_url: str, tmp_path: Path) -> None:
    environment = _environment(servers, empty_url, tmp_path)
    migrate(environment)
    with Tables(empty_url) as tables:
        tables.execute("UPDATE alembic_version SET version_num = 'newer'")
        command_line = [sys.executable, "-m", "fedssl_coordinator", "migrate"]
        done = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert '"database.newer"' in done.stderr
        assert tables.one("SELECT version_num FROM alembic_version") == "newer"
    assert _differences(empty_url) == []


def test_migrations_set_a_lock_timeout_and_a_statement_timeout(empty_url: str) -> None:
    """A migration that does not get its lock soon must fail. Otherwise every request would wait behind it."""
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        _to(empty_url, command.upgrade, "head")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    first_change = next(i for i, statement in enumerate(statements) if "CREATE TABLE" in statement)
    assert {"SET LOCAL lock_timeout = '5s'", "SET LOCAL statement_timeout = '60s'"} <= set(statements[:first_change])


@pytest.fixture
def tables(database_url: str) -> Iterator[Tables]:
    """Yield tables with a running run, its open round, and the assignments of its two clients."""
    with Tables(database_url) as looking:
        looking.execute("INSERT INTO artifacts (digest, num_bytes) VALUES (%s, 1)", DIGEST)
        looking.execute("INSERT INTO clients (id) VALUES ('a'), ('b')")
        looking.execute(
            "INSERT INTO runs (id, name, method, method_version, state, spec, num_rounds) "
            "VALUES (%s, 'r', 'm', 1, 'running', '{}', 2)",
            _RUN,
        )
        looking.execute(_NEW_ROUND, _ROUND, 1, "open", None)
        looking.execute(_NEW_ASSIGNMENT, uuid4(), "a", 1, "offered")
        looking.execute(_NEW_ASSIGNMENT, _ACCEPTED, "b", 1, "accepted")
        yield looking


_RUN, _ROUND, _ACCEPTED = uuid4(), uuid4(), uuid4()
_NEW_ROUND: LiteralString = (
    "INSERT INTO rounds (id, run_id, number, state, verdict, broadcast, deadline) "
    f"VALUES (%s, '{_RUN}', %s, %s, %s, '{DIGEST}', now())"
)
_NEW_ASSIGNMENT: LiteralString = (
    "INSERT INTO assignments (id, run_id, round_id, round_number, client_id, attempt, state, update_digest) "
    f"VALUES (%s, '{_RUN}', '{_ROUND}', 1, %s, %s, %s, '{DIGEST}')"
)

REFUSED: dict[str, tuple[LiteralString, tuple[Any, ...], str]] = {
    "a second unclosed round": (_NEW_ROUND, (uuid4(), 2, "open", None), "uq_rounds_one_unclosed"),
    "a second round being aggregated": (_NEW_ROUND, (uuid4(), 2, "aggregating", None), "uq_rounds_one_unclosed"),
    "a round's number twice": (_NEW_ROUND, (uuid4(), 1, "closed", "failed"), "uq_rounds_run_id_number"),
    "a round closed without a verdict": (_NEW_ROUND, (uuid4(), 2, "closed", None), "verdict_when_closed"),
    "a verdict on an open round": ("UPDATE rounds SET verdict = 'failed'", (), "verdict_when_closed"),
    "an unknown verdict": ("UPDATE rounds SET state = 'closed', verdict = 'maybe'", (), "verdict_known"),
    "an unknown state of a round": ("UPDATE rounds SET state = 'done'", (), "state_known"),
    "a second offer": (_NEW_ASSIGNMENT, (uuid4(), "a", 2, "offered"), "uq_assignments_one_live"),
    "a lease beside an offer": (
        "INSERT INTO assignments (id, run_id, round_id, round_number, client_id, attempt, state, lease_expires_at) "
        f"VALUES (%s, '{_RUN}', '{_ROUND}', 1, 'a', 2, 'leased', now())", (uuid4(),), "uq_assignments_one_live",
    ),
    "a second accepted update": (_NEW_ASSIGNMENT, (uuid4(), "b", 2, "accepted"), "uq_assignments_one_accepted"),
    "an attempt twice": (_NEW_ASSIGNMENT, (uuid4(), "b", 1, "expired"), "uq_assignments_round_id_client_id_attempt"),
    "an accepted update that is none": (
        "UPDATE assignments SET update_digest = NULL WHERE state = 'accepted'", (), "accepted_has_update",
    ),
    "a lease without an end": ("UPDATE assignments SET state = 'leased' WHERE state = 'offered'", (), "leased_has_end"),
    "an unknown state of an assignment": ("UPDATE assignments SET state = 'lost'", (), "state_known"),
    "an update that is not stored": ("UPDATE assignments SET update_digest = 'x'", (), "fk_assignments_update_digest"),
    "an unknown client": (_NEW_ASSIGNMENT, (uuid4(), "c", 1, "offered"), "fk_assignments_client_id"),
    "a finished run without an outcome": ("UPDATE runs SET state = 'finished'", (), "outcome_when_finished"),
    "an outcome of a running run": ("UPDATE runs SET outcome = 'completed'", (), "outcome_when_finished"),
    "an unknown outcome": ("UPDATE runs SET state = 'finished', outcome = 'won'", (), "outcome_known"),
    "more rounds closed than there are": ("UPDATE runs SET rounds_closed = 3", (), "rounds_closed_in_range"),
    "weights that are not stored": ("UPDATE runs SET broadcast = 'x'", (), "fk_runs_broadcast"),
    "a worker's token without a client": (
        "INSERT INTO tokens (id, role, label, secret_hash) VALUES (%s, 'worker', '', 'h')", (uuid4(),),
        "worker_has_client",
    ),
    "an operator's token with a client": (
        "INSERT INTO tokens (id, role, label, secret_hash, client_id) VALUES (%s, 'operator', '', 'h', 'a')",
        (uuid4(),), "worker_has_client",
    ),
    "a token of no role": (
        "INSERT INTO tokens (id, role, label, secret_hash) VALUES (%s, 'root', '', 'h')", (uuid4(),), "role_known",
    ),
    "an enrolment for nobody": (
        "INSERT INTO tokens (id, role, label, secret_hash, expires_at) VALUES (%s, 'enrolment', '', 'h', now())",
        (uuid4(),), "worker_has_client",
    ),
    "an enrolment without an end": (
        "INSERT INTO tokens (id, role, label, secret_hash, client_id) VALUES (%s, 'enrolment', '', 'h', 'a')",
        (uuid4(),), "enrolment_expires",
    ),
    "a viewer's token that was used": (
        "INSERT INTO tokens (id, role, label, secret_hash, used_at) VALUES (%s, 'viewer', '', 'h', now())",
        (uuid4(),), "enrolment_is_used",
    ),
    "two open enrolments of a client": (
        "INSERT INTO tokens (id, role, label, secret_hash, client_id, expires_at) "
        "SELECT gen_random_uuid(), 'enrolment', '', i, 'a', now() FROM generate_series(1, 2) AS i", (),
        "uq_tokens_one_open_enrolment",
    ),
    "an enrolment of two workers": (
        "WITH e AS (INSERT INTO tokens (id, role, label, secret_hash, client_id, expires_at) "
        "VALUES (gen_random_uuid(), 'enrolment', '', 'e', 'a', now()) RETURNING id) "
        "INSERT INTO tokens (id, role, label, secret_hash, client_id, enrolment_id) "
        "SELECT gen_random_uuid(), 'worker', '', i::text, 'a', e.id FROM e, generate_series(1, 2) AS i", (),
        "uq_tokens_enrolment_id",
    ),
    "an upload of nothing": (
        "INSERT INTO uploads (assignment_id, digest) VALUES (%s, 'x')", (_ACCEPTED,), "fk_uploads_digest",
    ),
    "public images that are not stored": (
        "INSERT INTO public_datasets (name, digest, split, num_images, channels, image_size) "
        "VALUES ('scans', 'x', 'train', 1, 1, 8)", (), "fk_public_datasets_digest",
    ),
    "public images of no split": (
        "INSERT INTO public_datasets (name, digest, split, num_images, channels, image_size) "
        "VALUES ('scans', 'x', 'validation', 1, 1, 8)", (), "ck_public_datasets_split_known",
    ),
    "evaluation images that are not stored": (
        "INSERT INTO evaluation_datasets (name, digest, num_train, num_test, num_classes, channels, image_size) "
        "VALUES ('scans', 'x', 1, 1, 1, 1, 8)", (), "fk_evaluation_datasets_digest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_postgres_refuses_rows_that_must_never_exist(tables: Tables, case: str) -> None:
    statement, values, constraint = REFUSED[case]
    before = tables.dump()
    with pytest.raises(psycopg.IntegrityError, match=constraint):
        tables.execute(statement, *values)
    assert tables.dump() == before


def test_postgres_refuses_duplicate_secrets_and_metrics(tables: Tables) -> None:
    new_token: LiteralString = "INSERT INTO tokens (id, role, label, secret_hash) VALUES (%s, 'operator', '', 'h')"
    new_metric: LiteralString = (
        f"INSERT INTO metrics (run_id, round_number, client_id, name, value) VALUES ('{_RUN}', 1, %s, 'loss', 1)"
    )
    for statement, values in ((new_token, (uuid4(),)), (new_metric, ("a",)), (new_metric, (None,))):
        tables.execute(statement, *values)
        with pytest.raises(psycopg.errors.UniqueViolation):
            tables.execute(statement, *(uuid4() if isinstance(value, type(_RUN)) else value for value in values))


def test_postgres_allows_closed_rounds_and_ended_attempts(tables: Tables) -> None:
    """A run may have closed rounds besides the open one, and ended attempts besides a live one."""
    tables.execute(_NEW_ROUND, uuid4(), 2, "closed", "failed")
    tables.execute(_NEW_ASSIGNMENT, uuid4(), "a", 2, "expired")
    tables.execute(_NEW_ASSIGNMENT, uuid4(), "a", 3, "declined")
    tables.execute(_NEW_ASSIGNMENT, uuid4(), "a", 4, "accepted")


def test_queried_columns_have_an_index(tables: Tables) -> None:
    """A foreign key without an index means a scan of the whole table, in hot paths and when artifacts are removed."""
    [(plan,)] = tables.query("SELECT string_agg(indexdef, E'\\n') FROM pg_indexes WHERE schemaname = 'public'")
    for columns in (
        "assignments USING btree (round_id, client_id, attempt)",
        "rounds USING btree (broadcast)",
        "rounds USING btree (run_id, number)",
        "metrics USING btree (run_id, id)",
        "events USING btree (run_id, id)",
        "runs USING btree (created_at, id)",
        "tokens USING btree (secret_hash)",
    ):
        assert columns in plan
