"""Wire models: what travels as JSON between client, coordinator and worker. Imports pydantic only."""
