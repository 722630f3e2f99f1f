"""Add whose sign-in at an OpenID Connect provider a token is."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_23_sign_in"
down_revision = "2026_11_23_second"

_CHECK = "ck_tokens_sign_in_expires"


def upgrade() -> None:
    op.add_column("tokens", sa.Column("subject", sa.Text(), nullable=True))
    op.create_index(op.f("ix_tokens_subject"), "tokens", ["subject"])
    expires = "subject IS NULL OR (client_id IS NULL AND expires_at IS NOT NULL)"
    op.create_check_constraint(op.f(_CHECK), "tokens", expires)


def downgrade() -> None:
    op.drop_constraint(op.f(_CHECK), "tokens", type_="check")
    op.drop_index(op.f("ix_tokens_subject"), table_name="tokens")
    op.drop_column("tokens", "subject")
