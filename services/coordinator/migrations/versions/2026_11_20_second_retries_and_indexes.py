"""Add the times at which failed computations may be retried, and indexes for frequent queries."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_20_second"
down_revision = "2026_11_20_first"


def upgrade() -> None:
    op.add_column("runs", sa.Column("num_tries", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("runs", sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True))
    op.create_unique_constraint(
        op.f("uq_assignments_round_id_client_id_attempt"), "assignments", ["round_id", "client_id", "attempt"]
    )
    op.create_check_constraint(
        op.f("ck_assignments_leased_has_end"), "assignments", "state <> 'leased' OR lease_expires_at IS NOT NULL"
    )
    op.create_index("ix_rounds_broadcast", "rounds", ["broadcast"], unique=False)
    op.create_index("ix_metrics_run_id_id", "metrics", ["run_id", "id"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_metrics_run_id_id", table_name="metrics")
    op.drop_index("ix_rounds_broadcast", table_name="rounds")
    op.drop_constraint(op.f("ck_assignments_leased_has_end"), "assignments", type_="check")
    op.drop_constraint(op.f("uq_assignments_round_id_client_id_attempt"), "assignments", type_="unique")
    op.drop_column("runs", "retry_at")
    op.drop_column("runs", "num_tries")
