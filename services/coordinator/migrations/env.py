"""Runs migrations on the connection that `fedssl_coordinator.core.migrate` (or a test) hands over."""

from alembic import context
from sqlalchemy import Connection, text

from fedssl_coordinator.core.models import Base


def run(connection: Connection) -> None:
    """Run all pending migrations in one transaction."""
    context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
    with context.begin_transaction():
        # A migration that does not get its lock soon fails, rather than making every request wait behind it.
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        connection.execute(text("SET LOCAL statement_timeout = '60s'"))
        context.run_migrations()
    connection.commit()


run(context.config.attributes["connection"])
