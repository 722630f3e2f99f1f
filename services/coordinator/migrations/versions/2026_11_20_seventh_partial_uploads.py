"""Add uploads that can be resumed."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_20_seventh"
down_revision = "2026_11_20_sixth"

_DATA_SETS = "uq_partial_uploads_one_a_data_set"


def upgrade() -> None:
    op.create_table(
        "partial_uploads",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("token_id", sa.Uuid(), nullable=False),
        sa.Column("assignment_id", sa.Uuid(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("is_complete", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_partial_uploads_token_id")),
        sa.ForeignKeyConstraint(["assignment_id"], ["assignments.id"], name=op.f("fk_partial_uploads_assignment_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_partial_uploads")),
        sa.UniqueConstraint("assignment_id", name=op.f("uq_partial_uploads_assignment_id")),
    )
    condition = sa.text("assignment_id IS NULL")
    op.create_index(_DATA_SETS, "partial_uploads", ["token_id", "digest"], unique=True, postgresql_where=condition)


def downgrade() -> None:
    op.drop_table("partial_uploads")
