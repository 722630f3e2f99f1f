"""Add roles, expiry and single-use enrolment of tokens. Operators could do everything: their tokens become admins'."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_20_sixth"
down_revision = "2026_11_20_fifth"

_OPEN = "role = 'enrolment' AND used_at IS NULL AND revoked_at IS NULL"


def upgrade() -> None:
    op.add_column("tokens", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("tokens", sa.Column("used_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("tokens", sa.Column("enrolment_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(op.f("fk_tokens_enrolment_id"), "tokens", "tokens", ["enrolment_id"], ["id"])
    op.create_unique_constraint(op.f("uq_tokens_enrolment_id"), "tokens", ["enrolment_id"])
    op.drop_constraint(op.f("ck_tokens_role_known"), "tokens", type_="check")
    op.drop_constraint(op.f("ck_tokens_worker_has_client"), "tokens", type_="check")
    op.execute("UPDATE tokens SET role = 'admin' WHERE role = 'operator'")
    for name, condition in (
        ("role_known", "role IN ('admin', 'operator', 'viewer', 'worker', 'enrolment')"),
        ("worker_has_client", "(role IN ('worker', 'enrolment')) = (client_id IS NOT NULL)"),
        ("enrolment_expires", "role <> 'enrolment' OR expires_at IS NOT NULL"),
        ("enrolment_is_used", "role = 'enrolment' OR used_at IS NULL"),
        ("worker_is_enrolled", "role = 'worker' OR enrolment_id IS NULL"),
    ):
        op.create_check_constraint(op.f(f"ck_tokens_{name}"), "tokens", condition)
    op.create_index(
        "uq_tokens_one_open_enrolment", "tokens", ["client_id"], unique=True, postgresql_where=sa.text(_OPEN)
    )


def downgrade() -> None:
    # No token may gain rights: viewers' tokens, enrolments and expiring tokens do not exist before this revision.
    op.execute("UPDATE tokens SET revoked_at = coalesce(revoked_at, now()) WHERE expires_at IS NOT NULL")
    op.drop_index("uq_tokens_one_open_enrolment", table_name="tokens", postgresql_where=sa.text(_OPEN))
    for name in ("role_known", "worker_has_client", "enrolment_expires", "enrolment_is_used", "worker_is_enrolled"):
        op.drop_constraint(op.f(f"ck_tokens_{name}"), "tokens", type_="check")
    op.drop_constraint(op.f("uq_tokens_enrolment_id"), "tokens", type_="unique")
    op.drop_constraint(op.f("fk_tokens_enrolment_id"), "tokens", type_="foreignkey")
    for name in ("enrolment_id", "used_at", "expires_at"):
        op.drop_column("tokens", name)
    op.execute("DELETE FROM tokens WHERE role NOT IN ('admin', 'worker')")
    op.execute("UPDATE tokens SET role = 'operator' WHERE role = 'admin'")
    op.create_check_constraint(op.f("ck_tokens_role_known"), "tokens", "role IN ('operator', 'worker')")
    op.create_check_constraint(
        op.f("ck_tokens_worker_has_client"), "tokens", "(role = 'worker') = (client_id IS NOT NULL)"
    )
