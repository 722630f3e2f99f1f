"""Runs the migrations under a lock, so that several processes may start at the same time."""

import time
from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from fedssl_coordinator.core.db import UNREACHABLE, direct_engine, engine

log = structlog.get_logger(__name__)

_LOCK = 0x66656473736C  # "fedssl"
_TRIES, _PAUSE_SECONDS = 10, 3.0
_IN_USE = ("40P01", "55P03")  # a deadlock with a working process, or a lock that it did not release in time

_WHAT_TO_DO = (
    "wait until the sessions that use the tables have ended, such as a backup, or end them with "
    "pg_terminate_backend(pid); then run `fedssl-coordinator migrate` again"
)

# Sessions that have used one of the tables for longer than a migration waits for its locks. The start of another role's
# transaction may be hidden.
_HOLDERS = text(
    "SELECT pid, application_name, state, query_start FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND coalesce(xact_start < clock_timestamp() - interval '5 s', true) "
    "AND pid IN (SELECT pg_locks.pid FROM pg_locks JOIN pg_class ON pg_class.oid = relation "
    "WHERE granted AND relnamespace = current_schema()::regnamespace) ORDER BY xact_start LIMIT 5"
)


def alembic_config() -> Config:
    """Return Alembic's config, for the migrations next to the sources or inside the installed package."""
    here = Path(__file__).parents[1]
    packaged, source = here / "migrations", here.parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(packaged if packaged.is_dir() else source))
    return config


def upgrade(revision: str = "head") -> None:
    """Upgrade the database to `revision`.

    Does nothing if a newer version has migrated the database: after a rollback this version can use its tables. Retries
    if it collides with processes that use the tables meanwhile. Raises OperationalError.
    """
    with direct_engine().connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK})
        connection.commit()
        try:
            config = alembic_config()
            config.attributes["connection"] = connection
            if (current := _revision(connection)) is None or current in _known(ScriptDirectory.from_config(config)):
                _upgrade_between_others(connection, config, revision)
            else:
                log.warning("database.newer", revision=current, consequence="its tables stay as they are")
        finally:
            connection.rollback()
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK})
            connection.commit()


def _upgrade_between_others(connection: Connection, config: Config, revision: str) -> None:
    for tries_left in reversed(range(_TRIES)):
        try:
            command.upgrade(config, revision)
            return
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _IN_USE:
                raise
            connection.rollback()
            reason, holders = str(error.orig).partition("\n")[0], _holders(connection)
            if not tries_left:
                log.error("migration.given_up", reason=reason, held_by=holders, what_to_do=_WHAT_TO_DO)
                raise
            log.warning("migration.collided", reason=reason, held_by=holders, retry_in_seconds=_PAUSE_SECONDS)
        time.sleep(_PAUSE_SECONDS)


def _holders(connection: Connection) -> list[str]:
    """Return the sessions for which a migration had to wait, in words."""
    found = [
        f"pid {row.pid} ({row.application_name or 'no application name'}), {row.state}, query of {row.query_start}"
        for row in connection.execute(_HOLDERS)
    ]
    connection.rollback()
    return found


def await_upgrade(seconds: float) -> bool:
    """Wait until the database has at least this version's tables. Returns False if it does not have them in time.

    An unknown revision belongs to a newer version, whose tables this version can use after a rollback.
    """
    script = ScriptDirectory.from_config(alembic_config())
    known, head = _known(script), script.get_current_head()
    deadline = time.monotonic() + seconds
    while True:
        try:
            with engine().connect() as connection:
                current = _revision(connection)
        except UNREACHABLE:
            current = None
        if current is not None and (current == head or current not in known):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1)


def _revision(connection: Connection) -> str | None:
    """Return the revision of the database's tables, or None if it has none."""
    current = MigrationContext.configure(connection).get_current_revision()
    connection.rollback()  # alembic begins its own transaction
    return current


def _known(script: ScriptDirectory) -> set[str]:
    """Return all revisions that this version knows."""
    return {revision.revision for revision in script.walk_revisions()}
