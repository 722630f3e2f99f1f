"""What every other package stands on: settings, database, audit log, problem responses, Celery, Redis, metrics."""
