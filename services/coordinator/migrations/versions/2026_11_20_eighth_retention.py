"""Add the times at which artifacts were stored and removed, and the number of updates that closes a round."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_20_eighth"
down_revision = "2026_11_20_seventh"

_INDEXES = {"assignments": "update_digest", "uploads": "digest", "evaluations": "model"}


def upgrade() -> None:
    touched_at = sa.Column("touched_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)
    op.add_column("artifacts", touched_at)
    op.add_column("artifacts", sa.Column("collected_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("rounds", sa.Column("num_wanted", sa.Integer(), nullable=True))
    for table, column in _INDEXES.items():
        op.create_index(f"ix_{table}_{column}", table, [column])


def downgrade() -> None:
    for table, column in _INDEXES.items():
        op.drop_index(f"ix_{table}_{column}", table_name=table)
    op.drop_column("rounds", "num_wanted")
    op.drop_column("artifacts", "collected_at")
    op.drop_column("artifacts", "touched_at")
