"""Add anchors of the clients' ledgers, the key that signs their receipts, and the clients' policies."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_20_fifth"
down_revision = "2026_11_20_fourth"


def upgrade() -> None:
    op.create_table(
        "ledger_anchors",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.Text(), nullable=False),
        sa.Column("is_consistent", sa.Boolean(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("seq >= 1", name=op.f("ck_ledger_anchors_seq_counts_from_one")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_ledger_anchors_client_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_anchors")),
        sa.UniqueConstraint("client_id", "key", "seq", "head", name=op.f("uq_ledger_anchors_client_id_key_seq_head")),
    )
    op.create_index("ix_ledger_anchors_client_id_id", "ledger_anchors", ["client_id", "id"], unique=False)
    op.create_table(
        "signing_keys",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("private_key", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_signing_keys_only_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_signing_keys")),
    )
    op.add_column("clients", sa.Column("policy", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("clients", "policy")
    op.drop_table("signing_keys")
    op.drop_index("ix_ledger_anchors_client_id_id", table_name="ledger_anchors")
    op.drop_table("ledger_anchors")
