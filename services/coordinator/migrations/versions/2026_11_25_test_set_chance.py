"""Add chance to evaluations: the accuracy of a constant answer on their test images."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_25_test_set_chance"
down_revision = "2026_11_25_site_evaluations"


def upgrade() -> None:
    op.add_column("evaluations", sa.Column("chance", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("evaluations", "chance")
