"""Write into specs which variant of hsd they have: until 25 November 2026, `mask` was the default and not stored."""

from alembic import op

revision = "2026_11_27_hsd_variant"
down_revision = "2026_11_25_second_data_reports"

_LACKS_VARIANT = """$.method.add_ons[*] ? (@.name == "hsd" && !exists(@.variant))"""


def upgrade() -> None:
    op.execute(
        f"""
        UPDATE runs SET spec = jsonb_set(spec, '{{method,add_ons}}', (
            SELECT jsonb_agg(
                CASE WHEN part ->> 'name' = 'hsd' THEN '{{"variant": "mask"}}' || part ELSE part END ORDER BY position
            )
            FROM jsonb_array_elements(spec #> '{{method,add_ons}}') WITH ORDINALITY AS parts(part, position)
        ))
        WHERE jsonb_path_exists(spec, '{_LACKS_VARIANT}')
        """
    )


def downgrade() -> None:
    """Nothing: earlier versions read the variant if it is there."""
