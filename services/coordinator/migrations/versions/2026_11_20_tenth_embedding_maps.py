"""Add the map of the representations that an evaluation stores."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_20_tenth"
down_revision = "2026_11_20_ninth"

_CHECK = "ck_evaluations_map_when_completed"


def upgrade() -> None:
    op.add_column("evaluations", sa.Column("embedding_map", postgresql.JSONB(), nullable=True))
    op.create_check_constraint(op.f(_CHECK), "evaluations", "embedding_map IS NULL OR state = 'completed'")


def downgrade() -> None:
    op.drop_constraint(op.f(_CHECK), "evaluations", type_="check")
    op.drop_column("evaluations", "embedding_map")
