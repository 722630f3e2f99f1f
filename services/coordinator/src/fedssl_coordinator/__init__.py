"""The coordinator: REST API, database and Celery tasks of a federation."""
