"""Add registered weights, and the weights that a run starts from."""

import sqlalchemy as sa
from alembic import op

revision = "2026_11_24_weights"
down_revision = "2026_11_24_third"


def upgrade() -> None:
    op.create_table(
        "registered_weights",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("source_digest", sa.Text(), nullable=False),
        sa.Column("num_tensors", sa.Integer(), nullable=False),
        sa.Column("num_parameters", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.CheckConstraint(
            "family IN ('fedssl', 'torchvision', 'huggingface')", name=op.f("ck_registered_weights_family_known")
        ),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_registered_weights_project")),
        sa.ForeignKeyConstraint(["digest"], ["artifacts.digest"], name=op.f("fk_registered_weights_digest")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_registered_weights")),
    )
    op.add_column("runs", sa.Column("initial_weights", sa.Text()))
    op.create_foreign_key("fk_runs_initial_weights", "runs", "artifacts", ["initial_weights"], ["digest"])


def downgrade() -> None:
    op.drop_column("runs", "initial_weights")
    op.drop_table("registered_weights")
