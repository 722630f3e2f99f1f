"""Add the models that are evaluated in place of broadcasts, and the tensors that clients receive once."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_25_third_models"
down_revision = "2026_11_25_second"

_COLUMNS = (("runs", "initial_model"), ("runs", "model"), ("runs", "frozen"), ("rounds", "model"))


def upgrade() -> None:
    for table, column in _COLUMNS:
        op.add_column(table, sa.Column(column, sa.Text()))
        op.create_foreign_key(f"fk_{table}_{column}", table, "artifacts", [column], ["digest"])
    op.create_index("ix_rounds_model", "rounds", ["model"], postgresql_where=sa.text("model IS NOT NULL"))


def downgrade() -> None:
    for table, column in _COLUMNS:
        op.drop_column(table, column)
