"""Add display names of clients."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_24_second"
down_revision = "2026_11_24_projects"


def upgrade() -> None:
    op.add_column("clients", sa.Column("display_name", sa.Text(), server_default=sa.text("''"), nullable=False))


def downgrade() -> None:
    op.drop_column("clients", "display_name")
