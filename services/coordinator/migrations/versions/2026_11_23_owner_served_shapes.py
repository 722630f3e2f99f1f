"""Add the shapes of images that a client's worker serves."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_23_owner"
down_revision = "2026_11_20_tenth"


def upgrade() -> None:
    op.add_column("clients", sa.Column("serves", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("clients", "serves")
