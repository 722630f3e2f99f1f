"""Add dimension assignments."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_20_third"
down_revision = "2026_11_20_second"


def upgrade() -> None:
    op.create_table(
        "dimension_assignments",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("dimension", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_dimension_assignments_client_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_dimension_assignments_run_id")),
        sa.PrimaryKeyConstraint("run_id", "dimension", name=op.f("pk_dimension_assignments")),
    )


def downgrade() -> None:
    op.drop_table("dimension_assignments")
