"""Projects: creating and listing them, and choosing the one that a request is about."""
