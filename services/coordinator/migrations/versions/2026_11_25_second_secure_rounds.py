"""Add secure rounds, and the identity keys of clients."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_25_second_secure_rounds"
down_revision = "2026_11_25_site_evaluations"

_MESSAGES = ("keys", "shares", "vectors", "confirmations", "reveals")


def upgrade() -> None:
    for name in ("identity", "announced_identity"):
        op.add_column("clients", sa.Column(name, sa.Text(), nullable=True))
    op.create_table(
        "secure_rounds",
        sa.Column("round_id", sa.Uuid(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=False),
        sa.Column("num_words", sa.BigInteger(), nullable=False),
        sa.Column("facts", postgresql.JSONB(none_as_null=True), nullable=False),
        sa.CheckConstraint(
            "phase IN ('keys', 'shares', 'vectors', 'confirmations', 'reveals', 'done', 'failed')",
            name=op.f("ck_secure_rounds_phase_known"),
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_secure_rounds_round_id")),
        sa.PrimaryKeyConstraint("round_id", name=op.f("pk_secure_rounds")),
    )
    op.create_table(
        "secure_members",
        sa.Column("round_id", sa.Uuid(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        *(sa.Column(name, postgresql.JSONB(none_as_null=True), nullable=True) for name in _MESSAGES),
        sa.ForeignKeyConstraint(["round_id"], ["secure_rounds.round_id"], name=op.f("fk_secure_members_round_id")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_secure_members_client_id")),
        sa.PrimaryKeyConstraint("round_id", "client_id", name=op.f("pk_secure_members")),
    )


def downgrade() -> None:
    op.drop_table("secure_members")
    op.drop_table("secure_rounds")
    for name in ("announced_identity", "identity"):
        op.drop_column("clients", name)
