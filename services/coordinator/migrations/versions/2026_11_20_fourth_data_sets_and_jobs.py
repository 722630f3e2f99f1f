"""Add public and evaluation data sets, distillation jobs, evaluations, and the encoder that a client declares."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "2026_11_20_fourth"
down_revision = "2026_11_20_third"


def upgrade() -> None:
    op.create_table(
        "evaluation_datasets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("num_train", sa.BigInteger(), nullable=False),
        sa.Column("num_test", sa.BigInteger(), nullable=False),
        sa.Column("num_classes", sa.Integer(), nullable=False),
        sa.Column("channels", sa.Integer(), nullable=False),
        sa.Column("image_size", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["artifacts.digest"], name=op.f("fk_evaluation_datasets_digest")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_evaluation_datasets")),
    )
    op.create_table(
        "public_datasets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("num_images", sa.BigInteger(), nullable=False),
        sa.Column("channels", sa.Integer(), nullable=False),
        sa.Column("image_size", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("split IN ('train', 'test')", name=op.f("ck_public_datasets_split_known")),
        sa.ForeignKeyConstraint(["digest"], ["artifacts.digest"], name=op.f("fk_public_datasets_digest")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_public_datasets")),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("dataset", sa.Text(), nullable=False),
        sa.Column("dataset_digest", sa.Text(), nullable=False),
        sa.Column("config", postgresql.JSONB(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("progress", postgresql.JSONB(), nullable=True),
        sa.Column("results", postgresql.JSONB(), nullable=True),
        sa.Column("num_tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state = 'completed') = (results IS NOT NULL)", name=op.f("ck_evaluations_results_when_completed")
        ),
        sa.CheckConstraint(
            "(state IN ('queued', 'running')) = (finished_at IS NULL)", name=op.f("ck_evaluations_finished_at_its_end")
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_evaluations_state_known"),
        ),
        sa.ForeignKeyConstraint(["dataset"], ["evaluation_datasets.name"], name=op.f("fk_evaluations_dataset")),
        sa.ForeignKeyConstraint(["dataset_digest"], ["artifacts.digest"], name=op.f("fk_evaluations_dataset_digest")),
        sa.ForeignKeyConstraint(["model"], ["artifacts.digest"], name=op.f("fk_evaluations_model")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint(
            "run_id",
            "round_number",
            "dataset_digest",
            "config",
            name=op.f("uq_evaluations_run_id_round_number_dataset_digest_config"),
        ),
    )
    op.create_index(
        "ix_evaluations_unfinished",
        "evaluations",
        ["state", "retry_at"],
        unique=False,
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.create_table(
        "distillation_jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("epoch", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_epochs", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("seconds_per_epoch", sa.Double(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("num_tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_distillation_jobs_state_known"),
        ),
        sa.CheckConstraint("epoch BETWEEN 0 AND num_epochs", name=op.f("ck_distillation_jobs_epoch_in_range")),
        sa.CheckConstraint(
            "checkpoint IS NULL OR state = 'running'", name=op.f("ck_distillation_jobs_checkpoint_while_running")
        ),
        sa.CheckConstraint(
            "(state IN ('queued', 'running')) = (finished_at IS NULL)",
            name=op.f("ck_distillation_jobs_finished_at_its_end"),
        ),
        sa.ForeignKeyConstraint(["checkpoint"], ["artifacts.digest"], name=op.f("fk_distillation_jobs_checkpoint")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_distillation_jobs_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_distillation_jobs")),
    )
    op.create_index("ix_distillation_jobs_run_id", "distillation_jobs", ["run_id", "created_at", "id"], unique=False)
    op.create_index(
        "uq_distillation_jobs_one_unfinished",
        "distillation_jobs",
        ["run_id"],
        unique=True,
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.add_column("clients", sa.Column("encoder", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("clients", "encoder")
    op.drop_index(
        "uq_distillation_jobs_one_unfinished",
        table_name="distillation_jobs",
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.drop_index("ix_distillation_jobs_run_id", table_name="distillation_jobs")
    op.drop_table("distillation_jobs")
    op.drop_index(
        "ix_evaluations_unfinished",
        table_name="evaluations",
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.drop_table("evaluations")
    op.drop_table("public_datasets")
    op.drop_table("evaluation_datasets")
