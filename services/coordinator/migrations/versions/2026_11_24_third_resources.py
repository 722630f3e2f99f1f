"""Add what a worker's process holds of its machine, next to its progress."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_24_third"
down_revision = "2026_11_24_second"


def upgrade() -> None:
    op.add_column("assignments", sa.Column("resources", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("assignments", "resources")
