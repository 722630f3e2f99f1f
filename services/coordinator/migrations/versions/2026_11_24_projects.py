"""Add projects. What exists belongs to `default`, and tokens that exist are restricted to none."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "2026_11_24_projects"
down_revision = "2026_11_23_labels"

_OF_ONE = ("clients", "runs", "public_datasets", "evaluation_datasets")
_OF_ONE_OR_ALL = ("tokens", "notification_destinations")
_WORKERS, _MEMBERS = "ck_tokens_worker_has_its_clients_project", "ck_tokens_member_signs_in"


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
    )
    op.execute("INSERT INTO projects (name) VALUES ('default')")
    for table in _OF_ONE:
        op.add_column(table, sa.Column("project", sa.Text(), server_default=sa.text("'default'"), nullable=False))
    for table in _OF_ONE_OR_ALL:
        op.add_column(table, sa.Column("project", sa.Text()))
    for table in (*_OF_ONE, *_OF_ONE_OR_ALL):
        op.create_foreign_key(f"fk_{table}_project", table, "projects", ["project"], ["name"])
    op.add_column("tokens", sa.Column("memberships", JSONB(none_as_null=True)))
    op.create_check_constraint(op.f(_WORKERS), "tokens", "project IS NULL OR client_id IS NULL")
    member = "memberships IS NULL OR (project IS NOT NULL AND subject IS NOT NULL)"
    op.create_check_constraint(op.f(_MEMBERS), "tokens", member)


def downgrade() -> None:
    # Without projects, a token for one would be for everything, and a destination would be notified of everything.
    op.execute("UPDATE tokens SET revoked_at = now() WHERE project IS NOT NULL AND revoked_at IS NULL")
    op.execute("DELETE FROM notification_destinations WHERE project IS NOT NULL")
    op.drop_constraint(op.f(_MEMBERS), "tokens")
    op.drop_constraint(op.f(_WORKERS), "tokens")
    op.drop_column("tokens", "memberships")
    for table in (*_OF_ONE, *_OF_ONE_OR_ALL):
        op.drop_column(table, "project")
    op.drop_table("projects")
