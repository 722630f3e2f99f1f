"""Create the first tables."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_20_first"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_artifacts")),
    )
    op.create_table(
        "clients",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("num_images", sa.BigInteger(), nullable=True),
        sa.Column("channels", sa.Integer(), nullable=True),
        sa.Column("image_size", sa.Integer(), nullable=True),
        sa.Column("worker_version", sa.Text(), nullable=True),
        sa.Column("methods", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clients")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("round_number", sa.Integer(), nullable=True),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column(
            "data", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_run_id_id", "events", ["run_id", "id"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("method_version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("plan", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("num_rounds", sa.Integer(), nullable=False),
        sa.Column("rounds_closed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("initial_broadcast", sa.Text(), nullable=True),
        sa.Column("server_state", sa.Text(), nullable=True),
        sa.Column("broadcast", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'finished') = (outcome IS NOT NULL)", name=op.f("ck_runs_outcome_when_finished")),
        sa.CheckConstraint("outcome IN ('completed', 'failed', 'stopped')", name=op.f("ck_runs_outcome_known")),
        sa.CheckConstraint("state IN ('created', 'running', 'paused', 'finished')", name=op.f("ck_runs_state_known")),
        sa.CheckConstraint("rounds_closed BETWEEN 0 AND num_rounds", name=op.f("ck_runs_rounds_closed_in_range")),
        sa.ForeignKeyConstraint(["broadcast"], ["artifacts.digest"], name=op.f("fk_runs_broadcast")),
        sa.ForeignKeyConstraint(["initial_broadcast"], ["artifacts.digest"], name=op.f("fk_runs_initial_broadcast")),
        sa.ForeignKeyConstraint(["server_state"], ["artifacts.digest"], name=op.f("fk_runs_server_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_runs_idempotency_key")),
    )
    op.create_index("ix_runs_created_at_id", "runs", ["created_at", "id"], unique=False)
    op.create_table(
        "tokens",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(role = 'worker') = (client_id IS NOT NULL)", name=op.f("ck_tokens_worker_has_client")),
        sa.CheckConstraint("role IN ('operator', 'worker')", name=op.f("ck_tokens_role_known")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_tokens_client_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_tokens_secret_hash")),
    )
    op.create_table(
        "metrics",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_metrics_client_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_metrics_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metrics")),
        sa.UniqueConstraint(
            "run_id",
            "round_number",
            "client_id",
            "name",
            name=op.f("uq_metrics_run_id_round_number_client_id_name"),
            postgresql_nulls_not_distinct=True,
        ),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("broadcast", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'closed') = (verdict IS NOT NULL)", name=op.f("ck_rounds_verdict_when_closed")),
        sa.CheckConstraint(
            "state IN ('open', 'aggregating', 'distilling', 'closed')", name=op.f("ck_rounds_state_known")
        ),
        sa.CheckConstraint(
            "verdict IN ('aggregated', 'partial', 'skipped', 'failed')", name=op.f("ck_rounds_verdict_known")
        ),
        sa.ForeignKeyConstraint(["broadcast"], ["artifacts.digest"], name=op.f("fk_rounds_broadcast")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rounds_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_rounds_run_id_number")),
    )
    op.create_index(
        "uq_rounds_one_unclosed", "rounds", ["run_id"], unique=True, postgresql_where=sa.text("state <> 'closed'")
    )
    op.create_table(
        "assignments",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round_id", sa.Uuid(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("update_digest", sa.Text(), nullable=True),
        sa.Column("num_examples", sa.BigInteger(), nullable=True),
        sa.Column("progress", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("offered_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("leased_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state <> 'accepted' OR update_digest IS NOT NULL", name=op.f("ck_assignments_accepted_has_update")
        ),
        sa.CheckConstraint(
            "state IN ('offered', 'leased', 'submitted', 'accepted', 'rejected', 'expired', 'declined')",
            name=op.f("ck_assignments_state_known"),
        ),
        sa.ForeignKeyConstraint(["client_id"], ["clients.id"], name=op.f("fk_assignments_client_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_assignments_round_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_assignments_run_id")),
        sa.ForeignKeyConstraint(["update_digest"], ["artifacts.digest"], name=op.f("fk_assignments_update_digest")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assignments")),
    )
    op.create_index(
        "ix_assignments_claimable",
        "assignments",
        ["client_id", "offered_at"],
        unique=False,
        postgresql_where=sa.text("state IN ('offered', 'leased', 'submitted')"),
    )
    op.create_index("ix_assignments_run_client", "assignments", ["run_id", "client_id", "round_number"], unique=False)
    op.create_index(
        "uq_assignments_one_accepted",
        "assignments",
        ["round_id", "client_id"],
        unique=True,
        postgresql_where=sa.text("state = 'accepted'"),
    )
    op.create_index(
        "uq_assignments_one_live",
        "assignments",
        ["round_id", "client_id"],
        unique=True,
        postgresql_where=sa.text("state IN ('offered', 'leased', 'submitted')"),
    )
    op.create_table(
        "uploads",
        sa.Column("assignment_id", sa.Uuid(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["assignment_id"], ["assignments.id"], name=op.f("fk_uploads_assignment_id")),
        sa.ForeignKeyConstraint(["digest"], ["artifacts.digest"], name=op.f("fk_uploads_digest")),
        sa.PrimaryKeyConstraint("assignment_id", "digest", name=op.f("pk_uploads")),
    )


def downgrade() -> None:
    op.drop_table("uploads")
    op.drop_index(
        "uq_assignments_one_live",
        table_name="assignments",
        postgresql_where=sa.text("state IN ('offered', 'leased', 'submitted')"),
    )
    op.drop_index(
        "uq_assignments_one_accepted", table_name="assignments", postgresql_where=sa.text("state = 'accepted'")
    )
    op.drop_index("ix_assignments_run_client", table_name="assignments")
    op.drop_index(
        "ix_assignments_claimable",
        table_name="assignments",
        postgresql_where=sa.text("state IN ('offered', 'leased', 'submitted')"),
    )
    op.drop_table("assignments")
    op.drop_index("uq_rounds_one_unclosed", table_name="rounds", postgresql_where=sa.text("state <> 'closed'"))
    op.drop_table("rounds")
    op.drop_table("metrics")
    op.drop_table("tokens")
    op.drop_index("ix_runs_created_at_id", table_name="runs")
    op.drop_table("runs")
    op.drop_index("ix_events_run_id_id", table_name="events")
    op.drop_table("events")
    op.drop_table("clients")
    op.drop_table("artifacts")
