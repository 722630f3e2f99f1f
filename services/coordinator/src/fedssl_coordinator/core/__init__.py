"""The foundation of all other packages: settings, database, audit log, problem responses, Celery, Redis, metrics."""
