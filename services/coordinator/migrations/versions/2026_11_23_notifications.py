"""Add destinations of notifications, and their deliveries."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_23_notifications"
down_revision = "2026_11_23_sign_in"

_DELIVERIES = "notification_deliveries"
_NOW = sa.text("now()")
_LATER = sa.text("clock_timestamp()")  # increases within a transaction


def upgrade() -> None:
    op.create_table(
        "notification_destinations",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("topics", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.CheckConstraint("kind IN ('webhook', 'email')", name=op.f("ck_notification_destinations_kind_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notification_destinations")),
    )
    op.create_table(
        _DELIVERIES,
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("destination_id", sa.Uuid(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column("once_per", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("num_tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_try_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=_LATER, nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'delivered', 'failed')", name=op.f("ck_notification_deliveries_state_known")
        ),
        sa.CheckConstraint(
            "(state = 'pending') = (ended_at IS NULL)", name=op.f("ck_notification_deliveries_ended_at_its_end")
        ),
        sa.ForeignKeyConstraint(
            ["destination_id"],
            ["notification_destinations.id"],
            name=op.f("fk_notification_deliveries_destination_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notification_deliveries")),
        sa.UniqueConstraint(
            "destination_id", "once_per", name=op.f("uq_notification_deliveries_destination_id_once_per")
        ),
    )
    due = sa.text("state = 'pending'")
    op.create_index("ix_notification_deliveries_due", _DELIVERIES, ["next_try_at"], postgresql_where=due)
    op.create_index("ix_notification_deliveries_newest", _DELIVERIES, ["destination_id", "created_at", "id"])


def downgrade() -> None:
    op.drop_table(_DELIVERIES)
    op.drop_table("notification_destinations")
