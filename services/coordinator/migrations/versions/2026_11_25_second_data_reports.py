"""Add what clients report of their images."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_25_second_data_reports"
down_revision = "2026_11_25_second_secure_rounds"


def upgrade() -> None:
    op.create_table(
        "data_reports",
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("report", postgresql.JSONB(none_as_null=True), nullable=False),
        sa.Column("reported_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_data_reports_client_id")),
        sa.PrimaryKeyConstraint("client_id", name=op.f("pk_data_reports")),
    )


def downgrade() -> None:
    op.drop_table("data_reports")
