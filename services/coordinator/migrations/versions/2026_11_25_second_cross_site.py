"""Add the classifiers of sites, their evaluations by other sites, and what a site has measured before it joined."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_25_second"
down_revision = "2026_11_25_test_set_chance"

_TABLE = "site_evaluations"
_ONCE = "uq_site_evaluations_run_id_round_number_client_id"


def upgrade() -> None:
    op.add_column("clients", sa.Column("check", postgresql.JSONB(none_as_null=True), nullable=True))
    op.add_column(_TABLE, sa.Column("head_of", sa.Text(), nullable=True))
    op.add_column(_TABLE, sa.Column("head", postgresql.JSONB(none_as_null=True), nullable=True))
    op.create_foreign_key(op.f("fk_site_evaluations_head_of"), _TABLE, "clients", ["head_of"], ["id"])
    op.drop_constraint(op.f(_ONCE), _TABLE)
    op.create_unique_constraint(
        op.f(f"{_ONCE}_head_of"),
        _TABLE,
        ["run_id", "round_number", "client_id", "head_of"],
        postgresql_nulls_not_distinct=True,
    )


def downgrade() -> None:
    op.execute(sa.text("DELETE FROM site_evaluations WHERE head_of IS NOT NULL"))
    op.drop_constraint(op.f(f"{_ONCE}_head_of"), _TABLE)
    op.create_unique_constraint(op.f(_ONCE), _TABLE, ["run_id", "round_number", "client_id"])
    op.drop_column(_TABLE, "head")
    op.drop_column(_TABLE, "head_of")
    op.drop_column("clients", "check")
