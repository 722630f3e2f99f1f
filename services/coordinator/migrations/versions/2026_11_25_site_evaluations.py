"""Add evaluations at the sites."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_25_site_evaluations"
down_revision = "2026_11_24_weights"


def upgrade() -> None:
    op.create_table(
        "site_evaluations",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("counts", postgresql.JSONB(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('offered', 'completed', 'refused', 'expired')", name=op.f("ck_site_evaluations_state_known")
        ),
        sa.CheckConstraint(
            "(state = 'completed') = (counts IS NOT NULL)", name=op.f("ck_site_evaluations_counts_when_completed")
        ),
        sa.CheckConstraint(
            "(state = 'offered') = (ended_at IS NULL)", name=op.f("ck_site_evaluations_ended_at_its_end")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_site_evaluations_run_id")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_site_evaluations_client_id")),
        sa.ForeignKeyConstraint(["model"], ["artifacts.digest"], name=op.f("fk_site_evaluations_model")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_site_evaluations")),
        sa.UniqueConstraint(
            "run_id", "round_number", "client_id", name=op.f("uq_site_evaluations_run_id_round_number_client_id")
        ),
    )
    op.create_index(
        "ix_site_evaluations_offered",
        "site_evaluations",
        ["client_id", "created_at"],
        postgresql_where=sa.text("state = 'offered'"),
    )
    op.create_index("ix_site_evaluations_model", "site_evaluations", ["model"])


def downgrade() -> None:
    op.drop_table("site_evaluations")
