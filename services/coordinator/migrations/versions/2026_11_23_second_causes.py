"""Add the causes of declined work, lost client states, and tries that ended their process."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_23_second"
down_revision = "2026_11_23_first"

_CHECK = "ck_assignments_cause_known"
_COMPUTED = ("runs", "distillation_jobs", "evaluations")


def upgrade() -> None:
    op.add_column("assignments", sa.Column("cause", sa.Text(), nullable=True))
    op.add_column("assignments", sa.Column("lost_round", sa.Integer(), nullable=True))
    causes = "cause IN ('client-data', 'client-machine', 'coordinator', 'spec')"
    op.create_check_constraint(op.f(_CHECK), "assignments", causes)
    op.add_column("runs", sa.Column("restart_round", sa.Integer(), nullable=True))
    for table in _COMPUTED:
        op.add_column(table, sa.Column("num_deaths", sa.Integer(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    for table in _COMPUTED:
        op.drop_column(table, "num_deaths")
    op.drop_column("runs", "restart_round")
    op.drop_constraint(op.f(_CHECK), "assignments", type_="check")
    op.drop_column("assignments", "lost_round")
    op.drop_column("assignments", "cause")
