"""Runs the migrations, under a lock, so that several processes may start at once."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text

from fedssl_coordinator.db import engine

_LOCK = 0x66656473736C  # "fedssl"


def alembic_config() -> Config:
    """Alembic's config, for the migrations beside the sources or inside the installed package."""
    here = Path(__file__).parent
    packaged, source = here / "migrations", here.parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(packaged if packaged.is_dir() else source))
    return config


def upgrade(revision: str = "head") -> None:
    """Bring the database to `revision`."""
    with engine().connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK})
        connection.commit()
        try:
            config = alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
        finally:
            connection.rollback()
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK})
            connection.commit()
