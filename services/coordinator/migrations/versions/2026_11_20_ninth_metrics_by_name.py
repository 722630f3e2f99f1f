"""Add an index that finds one metric in all rounds of a run, for the charts."""

from alembic import op

revision = "2026_11_20_ninth"
down_revision = "2026_11_20_eighth"


def upgrade() -> None:
    op.execute("SET LOCAL statement_timeout = 0")  # a large table takes minutes, and writers wait
    op.create_index("ix_metrics_run_id_name_round_number", "metrics", ["run_id", "name", "round_number"])


def downgrade() -> None:
    op.drop_index("ix_metrics_run_id_name_round_number", table_name="metrics")
