"""Add tags and notes of runs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "2026_11_23_labels"
down_revision = "2026_11_23_notifications"


def upgrade() -> None:
    op.add_column("runs", sa.Column("tags", JSONB(none_as_null=True), server_default=sa.text("'[]'"), nullable=False))
    op.add_column("runs", sa.Column("notes", sa.Text(), server_default=sa.text("''"), nullable=False))


def downgrade() -> None:
    op.drop_column("runs", "notes")
    op.drop_column("runs", "tags")
